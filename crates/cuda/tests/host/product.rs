//! Products against the engine's.

use crate::program::{Arg, launch, there_is_a_compiler};
use crate::values::{decode, encode, random, room};
use phalanx_cuda::{Element, Work};

#[test]
fn products_are_right_in_every_order_and_batch() {
    if !there_is_a_compiler() {
        return;
    }
    for element in Element::ALL {
        for (batch, m, n, k) in [(1, 1, 1, 1), (1, 7, 5, 9), (3, 4, 33, 2), (2, 1, 130, 3)] {
            for transposed in [[false, false], [true, false], [false, true]] {
                let (x, y) = (
                    random(element, batch * m * k, -1.0, 1.0, 1),
                    random(element, batch * k * n, -1.0, 1.0, 2),
                );
                let steps = |rows: usize, columns: usize, transposed: bool| {
                    if transposed { [1, rows, rows * columns] } else { [columns, 1, rows * columns] }
                };
                let (a, b) = (steps(m, k, transposed[0]), steps(k, n, transposed[1]));
                let mut want = vec![0.0; batch * m * n];
                for (i, sum) in want.iter_mut().enumerate() {
                    let (matrix, row, column) = (i / (m * n), i / n % m, i % n);
                    *sum = (0..k)
                        .map(|j| {
                            x[matrix * a[2] + row * a[0] + j * a[1]]
                                * y[matrix * b[2] + j * b[0] + column * b[1]]
                        })
                        .sum();
                }
                let mut out = room(element, want.len());
                let (x, y) = (encode(element, &x), encode(element, &y));
                let mut args = vec![Arg::In(&x), Arg::In(&y), Arg::Out(&mut out)];
                let sizes = [want.len(), m, n, k, a[0], a[1], a[2], b[0], b[1], b[2]];
                args.extend(sizes.map(|size| Arg::Int(size as i64)));
                launch("plain_product", element, Work::Elements(want.len() as u64), &mut args);
                // What storing rounds off a sum of a few terms below 1.
                let tolerance = match element {
                    Element::F32 => 1e-6,
                    Element::Bf16 => 2e-2,
                    Element::F16 => 2e-3,
                };
                for (i, (got, want)) in decode(element, &out).into_iter().zip(&want).enumerate() {
                    assert!((got - want).abs() <= tolerance, "{element:?}, {i}: {got}, not {want}");
                }
            }
        }
    }
}
