//! Numbers of the normal distribution, many at a time: the first values of a large model take longer than its start otherwise.
//!
//! Box and Muller: of two even numbers `a` and `b` in [0, 1), `sqrt(-2 ln(1 - a)) cos(2 pi b)`. Both functions are polynomials
//! here, exact to some 1e-14 where they are needed, in operations that every processor rounds the same way: so these numbers
//! are the same bits on all of them, as those of a system's library needn't be.

use crate::device::Device;
use crate::philox::Philox;
use pulp::NullaryFnOnce;
use std::f64::consts::{FRAC_PI_2, LN_2, SQRT_2};

/// Numbers that are made at a time: enough to fill the vectors.
const BATCH: usize = 64;
/// Numbers that a thread makes at a time: more work than the handing over is.
const PIECE: usize = 1 << 12;

impl Philox {
    /// Fills `values` with independent numbers of the normal distribution around 0, on the threads of `device`. The element `i`
    /// is made of the numbers that [`Philox::unit`] has at positions `2 * i` and `2 * i + 1`, and of nothing else.
    pub fn fill_normal(&self, device: &Device, std: f64, values: &mut [f32]) {
        device.for_pieces([values], PIECE, |start, [values]| {
            device.arch().dispatch(Normals { key: *self, start: start as u64, std, values });
        });
    }
}

/// Makes the numbers from `start` on, which is a multiple of [`BATCH`].
struct Normals<'a> {
    key: Philox,
    start: u64,
    std: f64,
    values: &'a mut [f32],
}

impl NullaryFnOnce for Normals<'_> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        let Normals { key, start, std, values } = self;
        let mut batch = [0.0; BATCH];
        for (i, values) in values.chunks_mut(BATCH).enumerate() {
            // Of a block of four words come two numbers.
            let [a, b, c, d] = key.blocks::<{ BATCH / 2 }>((start + (i * BATCH) as u64) / 2);
            for (j, pair) in batch.as_chunks_mut::<2>().0.iter_mut().enumerate() {
                *pair = [(std * normal(a[j], b[j])) as f32, (std * normal(c[j], d[j])) as f32];
            }
            values.copy_from_slice(&batch[..values.len()]);
        }
    }
}

/// The number that two words of random bits stand for; their low 8 bits don't take part.
#[inline(always)]
fn normal(a: u32, b: u32) -> f64 {
    let one_less_a = f64::from(((1 << 24) - (a >> 8)) as i32);
    let radius = (-2.0 * (ln(one_less_a) - 24.0 * LN_2)).sqrt();
    radius * cos_turns(b >> 8)
}

/// The natural logarithm of a whole number above 0.
#[inline(always)]
fn ln(x: f64) -> f64 {
    let bits = x.to_bits();
    let exponent = (bits >> 52) as i32 - 1023;
    let mantissa = f64::from_bits(bits & ((1 << 52) - 1) | 1023 << 52);
    // Around 1, where the series is short.
    let is_large = mantissa > SQRT_2;
    let mantissa = if is_large { mantissa / 2.0 } else { mantissa };
    let exponent = f64::from(exponent + i32::from(is_large));
    // ln m = 2 artanh s; |s| is at most 0.172.
    let s = (mantissa - 1.0) / (mantissa + 1.0);
    let z = s * s;
    let mut sum = 1.0 / 19.0;
    for n in [17.0, 15.0, 13.0, 11.0, 9.0, 7.0, 5.0, 3.0, 1.0] {
        sum = sum * z + 1.0 / n;
    }
    exponent * LN_2 + 2.0 * s * sum
}

/// The cosine of `turns` / 2^24 full turns, of which there is less than one.
#[inline(always)]
fn cos_turns(turns: u32) -> f64 {
    // The nearest quarter, and how far it is from there: an eighth of a turn at most.
    let quarter = (turns + (1 << 21)) >> 22;
    let rest = f64::from(turns as i32 - (quarter << 22) as i32) * (FRAC_PI_2 / f64::from(1 << 22));
    let z = rest * rest;
    let (mut cos, mut sin) = (1.0, 1.0);
    // The series of Taylor, from its far end.
    for n in [16.0, 14.0, 12.0, 10.0, 8.0, 6.0, 4.0, 2.0] {
        cos = 1.0 - z * (1.0 / (n * (n - 1.0))) * cos;
        sin = 1.0 - z * (1.0 / (n * (n + 1.0))) * sin;
    }
    let size = if quarter & 1 == 0 { cos } else { rest * sin };
    if (quarter + 1) & 2 == 0 { size } else { -size }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The same by the functions of the system's library.
    fn reference(key: Philox, i: u64) -> f64 {
        let [a, b] = [2 * i, 2 * i + 1].map(|position| f64::from(key.unit(position)));
        (-2.0 * (1.0 - a).ln()).sqrt() * (std::f64::consts::TAU * b).cos()
    }

    #[test]
    fn the_series_are_exact() {
        for x in (1..200).chain((1 << 24) - 200..=1 << 24).chain((1..1 << 24).step_by(997)) {
            let (found, wanted) = (ln(f64::from(x)), f64::from(x).ln());
            assert!((found - wanted).abs() <= 1e-14 * wanted.abs().max(1.0), "ln {x}: {found}, not {wanted}");
        }
        for turns in (0..1 << 24).step_by(101) {
            let wanted = (std::f64::consts::TAU * f64::from(turns) / f64::from(1 << 24)).cos();
            let found = cos_turns(turns);
            assert!((found - wanted).abs() < 1e-14, "{turns}: {found}, not {wanted}");
        }
        assert_eq!([0, 1 << 22, 1 << 23, 3 << 22].map(cos_turns), [1.0, 0.0, -1.0, 0.0]);
    }

    #[test]
    fn numbers_are_those_of_their_places_on_any_number_of_threads_and_any_processor() {
        let (key, n) = (Philox::new(7, 1), 10_003);
        let of = |device: &Device| {
            let mut values = vec![0.0; n];
            key.fill_normal(device, 3.0, &mut values);
            values
        };
        let values = of(&Device::cpu(1));
        for (i, value) in values.iter().enumerate() {
            let wanted = 3.0 * reference(key, i as u64);
            let last_place = (wanted as f32).abs().next_up() - (wanted as f32).abs();
            assert!(
                (f64::from(*value) - wanted).abs() <= f64::from(last_place),
                "{i}: {value}, not {wanted}"
            );
        }
        assert!(values == of(&Device::cpu(3)));
        assert!(values == of(&Device::with_arch(1, crate::cpu::arch::Arch::scalar())));
    }
}
