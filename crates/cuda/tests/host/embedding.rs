//! Rows of a table and their gradient against the engine's in float64.

use crate::compare::near;
use crate::program::{Arg, launch, there_is_a_compiler};
use crate::values::{decode, encode, random, room};
use phalanx_cuda::{Element, Work};
use phalanx_tensor::{Device, Tensor, Within};

/// Roundings of float32 of a sum of up to some hundred rows.
const STEPS: f64 = 20.0;

/// Row numbers of which some come often, some never.
fn ids(n: usize, rows: usize) -> Vec<i64> {
    (0..n).map(|i| (i * i % 7 * (i % 3) % rows) as i64).collect()
}

/// Rows `start..start + size[0]` of a table of `of`, each of `size[1]` numbers.
#[derive(Clone, Copy)]
struct Part {
    size: [usize; 2],
    start: usize,
    of: usize,
}

fn spans(ids: &[i64], Part { size: [rows, _], start, .. }: Part) -> [Vec<i64>; 2] {
    let (mut first, mut last) = (vec![ids.len() as i64; rows], vec![-1i64; rows]);
    launch(
        "embedding_spans",
        Element::F32,
        Work::Elements(ids.len() as u64),
        &mut [
            Arg::In(bytemuck::cast_slice(ids)),
            Arg::Out(bytemuck::cast_slice_mut(&mut first)),
            Arg::Out(bytemuck::cast_slice_mut(&mut last)),
            Arg::Int(ids.len() as i64),
            Arg::Int(rows as i64),
            Arg::Int(start as i64),
        ],
    );
    [first, last]
}

fn rows_of(element: Element, table: &[u8], ids: &[i64], part: Part) -> (Vec<f64>, i32) {
    let Part { size: [rows, width], start, of } = part;
    let (mut out, mut bad) = (room(element, ids.len() * width), 0i32.to_ne_bytes());
    launch(
        "embedding",
        element,
        Work::Elements((ids.len() * width) as u64),
        &mut [
            Arg::In(table),
            Arg::In(bytemuck::cast_slice(ids)),
            Arg::Out(&mut out),
            Arg::Out(&mut bad),
            Arg::Int(ids.len() as i64),
            Arg::Int(rows as i64),
            Arg::Int(width as i64),
            Arg::Int(start as i64),
            Arg::Int(of as i64),
        ],
    );
    (decode(element, &out), i32::from_ne_bytes(bad))
}

fn gradient(element: Element, grad: &[f64], ids: &[i64], part: Part) -> Vec<f64> {
    let Part { size: [rows, width], start, .. } = part;
    let [first, last] = spans(ids, part);
    let mut out = room(element, rows * width);
    launch(
        "embedding_gradient",
        element,
        Work::Rows { rows: rows as u64, width: width as u64 },
        &mut [
            Arg::In(&encode(element, grad)),
            Arg::In(bytemuck::cast_slice(ids)),
            Arg::In(bytemuck::cast_slice(&first)),
            Arg::In(bytemuck::cast_slice(&last)),
            Arg::Out(&mut out),
            Arg::Int(rows as i64),
            Arg::Int(width as i64),
            Arg::Int(start as i64),
        ],
    );
    decode(element, &out)
}

#[test]
fn rows_and_their_gradients_are_those_of_the_engine() {
    if !there_is_a_compiler() {
        return;
    }
    let device = Device::cpu(1);
    for element in Element::ALL {
        // Whole tables, and parts.
        for (n, size, start, of) in [
            (1, [1, 1], 0, 1),
            (100, [13, 5], 0, 13),
            (300, [3, 200], 0, 3),
            (40, [3, 1100], 0, 3),
            (33, [40, 33], 0, 40),
            (0, [3, 4], 0, 3),
            (100, [4, 5], 2, 13),
            (300, [2, 40], 5, 7),
        ] {
            let (ids, part) = (ids(n, of), Part { size, start, of });
            let values = random(element, size[0] * size[1], -1.0, 1.0, 1);
            let table = Tensor::from_slice(&device, &values, size).requires_grad();
            let within = Within { dim: 0, start, of };
            let out = table.embedding_within(within, &Tensor::from_slice(&device, &ids, [n]));
            let (got, bad) = rows_of(element, &encode(element, &values), &ids, part);
            assert!(
                got == out.detach().to_vec::<f64>() && bad == 0,
                "{element:?}: {n} of {size:?} from {start}"
            );
            let grad = random(element, n * size[1], -1.0, 1.0, 2);
            let sum = (out * Tensor::from_slice(&device, &grad, [n, size[1]])).sum_all();
            let want: Vec<f64> = sum.backward().get(&table).unwrap().to_vec();
            near("embedding_gradient", element, &gradient(element, &grad, &ids, part), &want, 10.0, STEPS);
        }
    }
}

#[test]
fn rows_that_the_table_does_not_have_are_told_and_read_nothing() {
    if !there_is_a_compiler() {
        return;
    }
    let ids = [1, -1, 2, 3, i64::MIN, i64::MAX];
    let part = Part { size: [3, 1], start: 0, of: 3 };
    let (out, bad) = rows_of(Element::F32, &encode(Element::F32, &[0.5, 1.5, 2.5]), &ids, part);
    assert_eq!((out[0], out[2], bad), (1.5, 2.5, 1));
    assert!(out[1].is_nan() && out[3..].iter().all(|x| x.is_nan()), "{out:?}");
    assert_eq!(gradient(Element::F32, &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], &ids, part), [0.0, 1.0, 3.0]);
}
