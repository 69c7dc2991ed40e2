//! Copies, transpositions and fills, bit by bit.

use crate::program::{Arg, launch, there_is_a_compiler};
use phalanx_cuda::{Element, Walk, Work};

const WIDTHS: [usize; 4] = [1, 2, 4, 8];

/// `n` elements of `bytes` bytes, all different as far as they can be.
fn elements(n: usize, bytes: usize) -> Vec<u8> {
    (0..n as u64)
        .flat_map(|i| (i.wrapping_mul(0x9e37_79b9_7f4a_7c15) + 1).to_le_bytes()[..bytes].to_vec())
        .collect()
}

/// A shape, and for each of its dimensions the step in the source and in the target, with how long both are.
struct Case {
    sizes: &'static [usize],
    from: &'static [usize],
    to: &'static [usize],
    lengths: [usize; 2],
}

const CASES: [Case; 6] = [
    Case { sizes: &[5, 7], from: &[1, 5], to: &[7, 1], lengths: [35, 35] },
    Case { sizes: &[2, 3, 4, 5], from: &[60, 20, 5, 1], to: &[60, 1, 15, 3], lengths: [120, 120] },
    // A stretch of the second dimension, into another place of a larger tensor.
    Case { sizes: &[3, 2, 4], from: &[20, 4, 1], to: &[28, 4, 1], lengths: [52, 68] },
    // Repeated.
    Case { sizes: &[30, 31], from: &[0, 1], to: &[31, 1], lengths: [31, 930] },
    Case { sizes: &[], from: &[], to: &[], lengths: [1, 1] },
    Case { sizes: &[0, 3], from: &[3, 1], to: &[3, 1], lengths: [0, 0] },
];

/// The places that a walk comes by, one dimension after the other.
fn places(sizes: &[usize], steps: &[usize]) -> Vec<usize> {
    let one = |all: Vec<usize>, (&size, &step): (&usize, &usize)| {
        all.iter().flat_map(|at| (0..size).map(move |i| at + i * step)).collect()
    };
    sizes.iter().zip(steps).fold(vec![0], one)
}

#[test]
fn every_element_of_a_view_is_copied_to_its_place_and_nothing_else_is_touched() {
    if !there_is_a_compiler() {
        return;
    }
    for bytes in WIDTHS {
        for Case { sizes, from, to, lengths } in &CASES {
            let source = elements(lengths[0], bytes);
            let mut target = vec![0xa5; lengths[1] * bytes];
            let mut want = target.clone();
            for (at, place) in places(sizes, from).into_iter().zip(places(sizes, to)) {
                want[place * bytes..][..bytes].copy_from_slice(&source[at * bytes..][..bytes]);
            }
            let n: usize = sizes.iter().product();
            launch(
                &format!("copy_{bytes}"),
                Element::F32,
                Work::Elements(n as u64),
                &mut [
                    Arg::In(&source),
                    Arg::Out(&mut target),
                    Arg::Struct(Walk::new(sizes, [from, to]).as_bytes().to_vec()),
                    Arg::Int(n as i64),
                ],
            );
            assert!(target == want, "{sizes:?}, {bytes} bytes");
        }
    }
}

#[test]
fn matrices_are_transposed() {
    if !there_is_a_compiler() {
        return;
    }
    for bytes in WIDTHS {
        for [matrices, rows, columns] in
            [[1, 1, 1], [1, 32, 32], [3, 33, 31], [2, 100, 3], [5, 1, 97], [0, 3, 3], [2, 0, 3]]
        {
            let source = elements(matrices * rows * columns, bytes);
            let mut target = vec![0xa5; source.len()];
            let work = Work::Tiles { matrices: matrices as u64, rows: rows as u64, columns: columns as u64 };
            launch(
                &format!("transpose_{bytes}"),
                Element::F32,
                work,
                &mut [
                    Arg::In(&source),
                    Arg::Out(&mut target),
                    Arg::Int(matrices as i64),
                    Arg::Int(rows as i64),
                    Arg::Int(columns as i64),
                ],
            );
            for (i, at) in
                places(&[matrices, columns, rows], &[rows * columns, 1, columns]).into_iter().enumerate()
            {
                assert_eq!(
                    target[i * bytes..][..bytes],
                    source[at * bytes..][..bytes],
                    "{matrices} {rows} {columns}"
                );
            }
        }
    }
}

#[test]
fn fills_repeat_the_bits() {
    if !there_is_a_compiler() {
        return;
    }
    let bits = 0x0123_4567_89ab_cdefu64;
    for bytes in WIDTHS {
        for n in [0, 1, 769] {
            let mut target = vec![0xa5; n * bytes];
            launch(
                &format!("fill_{bytes}"),
                Element::F32,
                Work::Elements(n as u64),
                &mut [Arg::Out(&mut target), Arg::Int(bits as i64), Arg::Int(n as i64)],
            );
            assert!(target == bits.to_le_bytes()[..bytes].repeat(n), "{bytes}");
        }
    }
}
