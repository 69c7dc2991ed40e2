//! Every family of operations on a device, against a CPU in float64: in float32, bfloat16 and float16.

use super::{Extent, Finding, sheltered};
use phalanx_tensor::cases::beside::{beside, tolerance};
use phalanx_tensor::cases::{self, Check, edges};
use phalanx_tensor::{DType, Device, Tensor};
use std::cell::RefCell;

/// What devices compute in.
const TYPES: [DType; 3] = [DType::F32, DType::BF16, DType::F16];

pub(super) fn all(device: &Device, extent: Extent, tell: &mut dyn FnMut(Finding)) {
    let large = cases::large_families::<Beside>();
    let large = if extent == Extent::Whole { &large[..] } else { &[] };
    for dtype in TYPES {
        for &(name, family) in cases::families::<Beside>().iter().chain(large) {
            let beside = Beside { device: device.clone(), dtype, seen: RefCell::default() };
            let panicked = sheltered(|| family(&beside)).err();
            let Seen { cases, apart, failure } = beside.seen.into_inner();
            tell(finding(name, dtype, cases, apart, failure.or(panicked)));
        }
    }
    for (name, edge) in edges::ALL {
        tell(finding(name, DType::F32, 1, 0.0, sheltered(|| edge(device)).err()));
    }
}

fn finding(name: &str, dtype: DType, cases: usize, apart: f64, failure: Option<String>) -> Finding {
    let (name, tolerance) = (name.to_owned(), tolerance(dtype));
    Finding::Operations { name, dtype: dtype.to_string(), cases, apart, tolerance, failure }
}

/// Holds the device beside a CPU.
struct Beside {
    device: Device,
    dtype: DType,
    seen: RefCell<Seen>,
}

/// What was seen of a family.
#[derive(Default)]
struct Seen {
    cases: usize,
    apart: f64,
    /// The first.
    failure: Option<String>,
}

impl Check for Beside {
    fn check_at(&self, shift: f64, shapes: &[&[usize]], f: &dyn Fn(&[Tensor]) -> Tensor) {
        let all = beside(&self.device, self.dtype, shift, shapes, f);
        let mut seen = self.seen.borrow_mut();
        seen.cases += 1;
        for result in all {
            let (what, by) = (result.what, result.by);
            seen.apart = seen.apart.max(by);
            if by > tolerance(self.dtype) {
                let off = if by.is_infinite() {
                    "is no number, or of another shape".to_owned()
                } else {
                    format!("is {by:.1e} off")
                };
                seen.failure.get_or_insert_with(|| format!("{what} {off}, at shapes {shapes:?}"));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn large_families_are_well_on_a_cpu() {
        for (name, family) in cases::large_families::<Beside>() {
            let beside = Beside { device: Device::cpu(1), dtype: DType::F32, seen: RefCell::default() };
            family(&beside);
            let seen = beside.seen.into_inner();
            assert!(seen.cases > 0 && seen.failure.is_none(), "{name}: {:?}", seen.failure);
        }
    }

    #[test]
    fn a_wrong_operation_is_found_and_named() {
        for dtype in TYPES {
            let beside = Beside { device: Device::cpu(1), dtype, seen: RefCell::default() };
            beside.check(&[&[3]], |x| x[0].square());
            assert!(beside.seen.borrow().failure.is_none());
            // The side that is tried is moved, by what is the same in two digits however the type rounds it.
            beside.check(&[&[3], &[2]], |x| {
                let by = if x[0].dtype() == dtype { 0.15 } else { 0.0 };
                Tensor::cat(&[&(&x[0] + by), &x[1]], 0)
            });
            let failure = beside.seen.borrow().failure.clone().unwrap();
            let parts = ["the output is 1.5e-1 off", "[[3], [2]]"];
            assert!(parts.iter().all(|part| failure.contains(part)), "{dtype}: {failure}");
        }
    }
}
