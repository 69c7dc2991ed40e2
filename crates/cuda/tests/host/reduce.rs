//! Sums along dimensions against the engine's in float64.

use crate::compare::near;
use crate::program::{Arg, launch, there_is_a_compiler};
use crate::values::{decode, encode, random, room};
use phalanx_cuda::{Element, Walk, Work};
use phalanx_tensor::{Device, Keep, Tensor};

/// What a sum of terms of size 1 may be off by, in roundings of float32 of the largest sum on the way: each of up to some hundred
/// additions of a thread rounds by half a step, and errors go both ways.
const STEPS: f64 = 40.0;

/// A row-major shape, and the dimensions that go.
const CASES: [(&[usize], &[usize]); 9] = [
    (&[7, 300], &[1]),
    (&[300, 7], &[0]),
    (&[3, 5, 7, 2], &[0, 2]),
    (&[3, 5, 7, 2], &[1, 3]),
    (&[1999], &[0]),
    (&[1, 1], &[0]),
    (&[4, 0, 3], &[1]),
    (&[0, 3], &[1]),
    (&[2, 3], &[]),
];

/// The dimensions for which `goes` holds, as a walk; and how many elements that is.
fn walk(shape: &[usize], goes: impl Fn(usize) -> bool) -> (Vec<u8>, usize) {
    let dims: Vec<usize> = (0..shape.len()).filter(|&d| goes(d)).collect();
    let sizes: Vec<usize> = dims.iter().map(|&d| shape[d]).collect();
    let steps: Vec<usize> = dims.iter().map(|&d| shape[d + 1..].iter().product()).collect();
    (Walk::new(&sizes, [&steps[..]]).as_bytes().to_vec(), sizes.iter().product())
}

struct Case<'a> {
    element: Element,
    x: &'a [u8],
    outputs: (Vec<u8>, usize),
    terms: (Vec<u8>, usize),
}

impl Case<'_> {
    fn at_once(&self, kernel: &str) -> Vec<f64> {
        let mut out = room(self.element, self.outputs.1);
        let rows = Work::Rows { rows: self.outputs.1 as u64, width: self.terms.1 as u64 };
        let work = if kernel == "sum_by_thread" { Work::Elements(self.outputs.1 as u64) } else { rows };
        launch(
            kernel,
            self.element,
            work,
            &mut [
                Arg::In(self.x),
                Arg::Out(&mut out),
                Arg::Struct(self.outputs.0.clone()),
                Arg::Struct(self.terms.0.clone()),
                Arg::Int(self.outputs.1 as i64),
                Arg::Int(self.terms.1 as i64),
            ],
        );
        decode(self.element, &out)
    }

    fn in_pieces(&self, piece: usize, factor: f32) -> Vec<f64> {
        let pieces = self.terms.1.div_ceil(piece);
        let mut parts = room(Element::F32, self.outputs.1 * pieces);
        launch(
            "sum_pieces",
            self.element,
            Work::Rows { rows: (self.outputs.1 * pieces) as u64, width: piece as u64 },
            &mut [
                Arg::In(self.x),
                Arg::Out(&mut parts),
                Arg::Struct(self.outputs.0.clone()),
                Arg::Struct(self.terms.0.clone()),
                Arg::Int(self.outputs.1 as i64),
                Arg::Int(self.terms.1 as i64),
                Arg::Int(piece as i64),
            ],
        );
        let mut out = room(self.element, self.outputs.1);
        launch(
            "sum_parts",
            self.element,
            Work::Rows { rows: self.outputs.1 as u64, width: pieces as u64 },
            &mut [
                Arg::In(&parts),
                Arg::Out(&mut out),
                Arg::Int(self.outputs.1 as i64),
                Arg::Int(pieces as i64),
                Arg::Float(factor),
            ],
        );
        decode(self.element, &out)
    }
}

#[test]
fn sums_are_those_of_the_engine_in_each_of_their_ways() {
    if !there_is_a_compiler() {
        return;
    }
    for element in Element::ALL {
        for (shape, dims) in CASES {
            let values = random(element, shape.iter().product(), -1.0, 1.0, 1);
            let x = encode(element, &values);
            let (outputs, terms) = (walk(shape, |d| !dims.contains(&d)), walk(shape, |d| dims.contains(&d)));
            let case = Case { element, x: &x, outputs, terms };
            let want = Tensor::from_slice(&Device::cpu(1), &values, shape).sum(dims, Keep::No).to_vec();
            let scale = (case.terms.1 as f64).sqrt().max(1.0);
            for kernel in ["sum_by_thread", "sum_by_block"] {
                near(kernel, element, &case.at_once(kernel), &want, scale, STEPS);
            }
            for piece in [1000, 100, 7] {
                near("sum_pieces", element, &case.in_pieces(piece, 1.0), &want, scale, STEPS);
            }
            let halves: Vec<f64> = want.iter().map(|x| x / 2.0).collect();
            near("sum_parts", element, &case.in_pieces(100, 0.5), &halves, scale, STEPS);
        }
    }
}

#[test]
fn columns_are_added_up_in_pieces() {
    if !there_is_a_compiler() {
        return;
    }
    for element in Element::ALL {
        for ([rows, width], piece) in
            [([1, 1], 8), ([100, 33], 8), ([257, 97], 64), ([0, 5], 8), ([1999, 3], 128), ([700, 136], 300)]
        {
            let values = random(element, rows * width, -1.0, 1.0, 1);
            let pieces = rows.div_ceil(piece);
            let mut parts = room(Element::F32, pieces * width);
            launch(
                "sum_columns",
                element,
                Work::Columns { pieces: pieces as u64, width: width as u64, bytes: element.bytes() as u64 },
                &mut [
                    Arg::In(&encode(element, &values)),
                    Arg::Out(&mut parts),
                    Arg::Int(rows as i64),
                    Arg::Int(width as i64),
                    Arg::Int(piece as i64),
                ],
            );
            let mut out = room(element, width);
            launch(
                "sum_parts",
                element,
                Work::Rows { rows: width as u64, width: pieces as u64 },
                &mut [
                    Arg::In(&parts),
                    Arg::Out(&mut out),
                    Arg::Int(width as i64),
                    Arg::Int(pieces as i64),
                    Arg::Float(1.0),
                ],
            );
            let want =
                Tensor::from_slice(&Device::cpu(1), &values, [rows, width]).sum(&[0], Keep::No).to_vec();
            near("sum_columns", element, &decode(element, &out), &want, (rows as f64).sqrt().max(1.0), STEPS);
        }
    }
}

/// Numbers with ties, of which some are none.
fn with_ties(element: Element, n: usize, with_nan: bool) -> Vec<f64> {
    let mut values: Vec<f64> = random(element, n, -4.0, 4.0, 1).iter().map(|x| x.round()).collect();
    if with_nan {
        values.iter_mut().skip(5).step_by(71).for_each(|x| *x = f64::NAN);
    }
    values
}

#[test]
fn the_largest_and_their_places_are_those_of_the_engine() {
    if !there_is_a_compiler() {
        return;
    }
    let device = Device::cpu(1);
    for (element, with_nan) in
        Element::ALL.into_iter().flat_map(|element| [(element, false), (element, true)])
    {
        for [outer, size, inner] in [[1, 1, 1], [7, 300, 1], [3, 33, 5], [0, 3, 2], [4, 3, 0], [900, 2, 1]] {
            let values = with_ties(element, outer * size * inner, with_nan);
            let x = Tensor::from_slice(&device, &values, [outer, size, inner]).requires_grad();
            let largest = x.max(1, Keep::No);
            let (want, want_at) = (largest.detach().to_vec(), x.argmax(1).to_vec::<i64>());
            let n = outer * inner;
            for kernel in ["max_by_thread", "max_by_block"] {
                if kernel == "max_by_block" && inner != 1 {
                    continue;
                }
                let (mut out, mut index) = (room(element, n), vec![0xa5; n * 8]);
                let given = encode(element, &values);
                let mut args = vec![Arg::In(&given), Arg::Out(&mut out), Arg::Out(&mut index)];
                args.extend([outer, size].map(|n| Arg::Int(n as i64)));
                let mut work = Work::Rows { rows: outer as u64, width: size as u64 };
                if kernel == "max_by_thread" {
                    args.push(Arg::Int(inner as i64));
                    work = Work::Elements(n as u64);
                }
                launch(kernel, element, work, &mut args);
                near(kernel, element, &decode(element, &out), &want, 0.0, 0.0);
                let index: Vec<i64> = index.chunks_exact(8).map(bytemuck::pod_read_unaligned).collect();
                assert_eq!(index, want_at, "{kernel} for {element:?}: {outer} {size} {inner}");
            }
            let grad = random(element, n, -1.0, 1.0, 2);
            let mut out = room(element, values.len());
            launch(
                "max_gradient",
                element,
                Work::Elements(values.len() as u64),
                &mut [
                    Arg::In(&encode(element, &grad)),
                    Arg::In(bytemuck::cast_slice(&want_at)),
                    Arg::Out(&mut out),
                    Arg::Int(outer as i64),
                    Arg::Int(size as i64),
                    Arg::Int(inner as i64),
                ],
            );
            let sum = (largest * Tensor::from_slice(&device, &grad, [outer, inner])).sum_all();
            let want: Vec<f64> = sum.backward().get(&x).unwrap().to_vec();
            assert_eq!(decode(element, &out), want, "max_gradient for {element:?}: {outer} {size} {inner}");
        }
    }
}
