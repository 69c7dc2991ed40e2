//! Softmax and its logarithm against the engine's in float64.

use crate::compare::near;
use crate::program::{Arg, launch, there_is_a_compiler};
use crate::values::{decode, encode, random, room};
use phalanx_cuda::{Element, Work};
use phalanx_tensor::{Device, Tensor};

/// Roundings of float32: the exponentials, sums of up to a thousand shares of one, and the formula.
const STEPS: f64 = 30.0;

/// Rows and widths.
const SIZES: [[usize; 2]; 7] = [[1, 1], [5, 10], [3, 1000], [7, 257], [2, 32], [0, 5], [11, 33]];

/// The gradient of a row's input, from its output and that one's gradient.
type Row<'a> = &'a dyn Fn(&[f64], &[f64]) -> Vec<f64>;

fn rows(kernel: &str, element: Element, [rows, width]: [usize; 2], inputs: &[&[f64]]) -> Vec<f64> {
    let mut out = room(element, rows * width);
    let inputs: Vec<Vec<u8>> = inputs.iter().map(|values| encode(element, values)).collect();
    let mut args: Vec<Arg<'_>> = inputs.iter().map(|bytes| Arg::In(bytes)).collect();
    args.extend([Arg::Out(&mut out), Arg::Int(rows as i64), Arg::Int(width as i64)]);
    launch(kernel, element, Work::Rows { rows: rows as u64, width: width as u64 }, &mut args);
    decode(element, &out)
}

#[test]
fn rows_are_those_of_the_engine() {
    if !there_is_a_compiler() {
        return;
    }
    for element in Element::ALL {
        for size in SIZES {
            // Far enough from zero that a plain exponential would overflow.
            let x = random(element, size[0] * size[1], 80.0, 100.0, 1);
            let tensor = Tensor::from_slice(&Device::cpu(1), &x, size);
            near(
                "softmax",
                element,
                &rows("softmax", element, size, &[&x]),
                &tensor.softmax(1).to_vec(),
                0.0,
                20.0 * STEPS,
            );
            let want = tensor.log_softmax(1).to_vec();
            near("log_softmax", element, &rows("log_softmax", element, size, &[&x]), &want, 100.0, STEPS);
        }
    }
}

#[test]
fn gradients_are_those_of_the_outputs_that_were_kept() {
    if !there_is_a_compiler() {
        return;
    }
    let device = Device::cpu(1);
    for element in Element::ALL {
        for size in SIZES {
            let [n_rows, width] = size;
            let grad = random(element, n_rows * width, -1.0, 1.0, 2);
            let x = Tensor::from_slice(&device, &random(element, n_rows * width, -2.0, 2.0, 1), size);
            let kept = |y: Tensor| decode(element, &encode(element, &y.to_vec::<f64>()));
            let of_rows = |y: &[f64], one: Row<'_>| -> Vec<f64> {
                y.chunks(width).zip(grad.chunks(width)).flat_map(|(y, g)| one(y, g)).collect()
            };
            let y = kept(x.softmax(1));
            let want = of_rows(&y, &|y, g| {
                let dot: f64 = y.iter().zip(g).map(|(y, g)| y * g).sum();
                y.iter().zip(g).map(|(y, g)| y * (g - dot)).collect()
            });
            near(
                "softmax_gradient",
                element,
                &rows("softmax_gradient", element, size, &[&y, &grad]),
                &want,
                1.0,
                STEPS,
            );
            let y = kept(x.log_softmax(1));
            let want = of_rows(&y, &|y, g| {
                let sum: f64 = g.iter().sum();
                y.iter().zip(g).map(|(y, g)| g - y.exp() * sum).collect()
            });
            let got = rows("log_softmax_gradient", element, size, &[&y, &grad]);
            near("log_softmax_gradient", element, &got, &want, (width as f64).sqrt(), STEPS);
        }
    }
}

#[test]
fn a_row_with_nan_is_all_nan() {
    if !there_is_a_compiler() {
        return;
    }
    // Among numbers, among nothing but minus infinity before some, and alone.
    let mut among = vec![1.0; 3 * 40];
    among[40 + 37] = f64::NAN;
    let mut behind = vec![1.0; 3 * 40];
    behind[40..70].fill(f64::NEG_INFINITY);
    behind[40 + 9] = f64::NAN;
    let mut alone = vec![1.0; 3 * 40];
    alone[40..80].fill(f64::NAN);
    for (kernel, element) in ["softmax", "log_softmax"].into_iter().flat_map(|k| Element::ALL.map(|e| (k, e)))
    {
        for x in [&among, &behind, &alone] {
            let out = rows(kernel, element, [3, 40], &[x]);
            assert!(
                out.iter().enumerate().all(|(i, y)| y.is_nan() == (40..80).contains(&i)),
                "{kernel}, {element:?}: {out:?}"
            );
        }
    }
}

/// As masks make them: what is minus infinity has no share, whichever threads have it, and rows of nothing else have no softmax.
#[test]
fn numbers_that_are_masked_have_no_share() {
    if !there_is_a_compiler() {
        return;
    }
    const WIDTH: usize = 1000;
    let device = Device::cpu(1);
    for element in Element::ALL {
        let mut x = random(element, 4 * WIDTH, -2.0, 2.0, 3);
        // All but the last; all but some that one thread has; every second; all.
        x[..WIDTH - 1].fill(f64::NEG_INFINITY);
        (0..WIDTH).filter(|i| !(8..16).contains(i)).for_each(|i| x[WIDTH + i] = f64::NEG_INFINITY);
        (0..WIDTH).step_by(2).for_each(|i| x[2 * WIDTH + i] = f64::NEG_INFINITY);
        x[3 * WIDTH..].fill(f64::NEG_INFINITY);
        let of = Tensor::from_slice(&device, &x[..3 * WIDTH], [3, WIDTH]);
        let got = rows("softmax", element, [4, WIDTH], &[&x]);
        near("softmax", element, &got[..3 * WIDTH], &of.softmax(1).to_vec::<f64>(), 1.0, STEPS);
        assert!(got[3 * WIDTH..].iter().all(|y| y.is_nan()), "{element:?}");
        let got = rows("log_softmax", element, [4, WIDTH], &[&x]);
        for (got, want) in got.iter().zip(of.log_softmax(1).to_vec::<f64>()) {
            assert_eq!(*got == f64::NEG_INFINITY, want == f64::NEG_INFINITY, "{element:?}");
        }
    }
}
