//! What is done to all gradients together, and conversions between types.

use crate::program::{Arg, launch, there_is_a_compiler};
use crate::values::{SIZES, decode, encode, floats, random, room};
use phalanx_cuda::{Element, Run, Spread, Work};
use phalanx_nn::optim::Clip;

/// The norm of all numbers, whose squares are added up in pieces of so many.
fn norm(element: Element, x: &[u8], piece: usize) -> f64 {
    let n = x.len() / element.bytes();
    let pieces = n.div_ceil(piece);
    let (mut parts, mut norm) = (vec![0xa5; pieces * 8], [0xa5; 8]);
    launch(
        "sum_squares",
        element,
        Work::Rows { rows: pieces as u64, width: piece as u64 },
        &mut [Arg::In(x), Arg::Out(&mut parts), Arg::Int(n as i64), Arg::Int(piece as i64)],
    );
    launch(
        "norm_of_parts",
        element,
        Work::Rows { rows: 1, width: pieces as u64 },
        &mut [Arg::In(&parts), Arg::Out(&mut norm), Arg::Int(pieces as i64)],
    );
    f64::from_ne_bytes(norm)
}

#[test]
fn gradients_have_the_norm_of_a_cpu_and_are_cut_by_value_as_there() {
    if !there_is_a_compiler() {
        return;
    }
    // The last pieces are so long that threads take several of their numbers at once.
    for (n, piece) in SIZES.map(|n| (n, 300)).into_iter().chain([(12_345, 5000), (8192, 8192)]) {
        let values = random(Element::F32, n, -1.0, 1.0, 1);
        let mut cut: Vec<f32> = values.iter().map(|&x| x as f32).collect();
        let want = Clip { norm: Some(0.25), value: None }.apply(&mut cut).unwrap();
        let found = norm(Element::F32, &encode(Element::F32, &values), piece);
        // Sums in another order, in double precision.
        assert!((found - want).abs() <= 1e-14 * want, "{n}: {found}, not {want}");
        for limit in [0.25, 1000.0] {
            let mut want: Vec<f32> = values.iter().map(|&x| x as f32).collect();
            Clip { norm: None, value: Some(limit) }.apply(&mut want);
            let mut x = encode(Element::F32, &values);
            launch(
                "clip_value",
                Element::F32,
                Work::Elements(n as u64),
                &mut [Arg::Out(&mut x), Arg::Float(limit as f32), Arg::Int(n as i64)],
            );
            assert!(floats(&x) == want, "{n}");
        }
    }
}

#[test]
fn what_is_no_number_has_no_finite_norm_and_what_is_large_has_one() {
    if !there_is_a_compiler() {
        return;
    }
    for bad in [f64::NAN, f64::INFINITY] {
        assert!(!norm(Element::Bf16, &encode(Element::Bf16, &[1.0, bad, 0.0]), 300).is_finite(), "{bad}");
    }
    let large = norm(Element::F32, &encode(Element::F32, &[3e38; 40]), 16);
    assert!((large / (40f64.sqrt() * f64::from(3e38f32)) - 1.0).abs() < 1e-14, "{large}");
}

#[test]
fn a_number_that_is_none_is_found_wherever_it_stands() {
    if !there_is_a_compiler() {
        return;
    }
    for element in Element::ALL {
        let n = 1000;
        let found = |x: &[f64]| {
            let mut found = 0i32.to_ne_bytes();
            launch(
                "find_not_finite",
                element,
                Work::Elements(n as u64),
                &mut [Arg::In(&encode(element, x)), Arg::Out(&mut found), Arg::Int(n as i64)],
            );
            i32::from_ne_bytes(found)
        };
        let mut x = random(element, n, -1.0, 1.0, 1);
        x[500] = if element == Element::F16 { 65504.0 } else { 3e38 };
        assert_eq!(found(&x), 0, "{element:?}");
        for (at, bad) in [(0, f64::NAN), (999, f64::INFINITY), (770, f64::NEG_INFINITY)] {
            let mut x = x.clone();
            x[at] = bad;
            assert_eq!(found(&x), 1, "{element:?}: {bad} at {at}");
        }
    }
}

#[test]
fn conversions_round_to_the_nearest() {
    if !there_is_a_compiler() {
        return;
    }
    // Every number of 16 bits, and around each step of the short types: below, at and above its middle.
    let halves = (0..=u16::MAX).map(|bits| f32::from_bits(u32::from(bits) << 16));
    let steps = (0..60_000u32).map(|i| f32::from_bits(i.wrapping_mul(0x1_1abc) ^ 0x3f80_0000));
    let middles = (0..2000u32).flat_map(|i| {
        [0x387f_f000u32, 0x3f80_0000, 0x477f_e000, 0x3300_0000].map(|from| f32::from_bits(from + i * 0x100))
    });
    let values: Vec<f64> = halves.chain(steps).chain(middles).map(f64::from).collect();
    for from in Element::ALL {
        let kernel = match from {
            Element::F32 => "from_f32",
            Element::Bf16 => "from_bf16",
            Element::F16 => "from_f16",
        };
        let source = encode(from, &values);
        for to in Element::ALL {
            let mut out = room(to, values.len());
            launch(
                kernel,
                to,
                Work::Elements(values.len() as u64),
                &mut [Arg::In(&source), Arg::Out(&mut out), Arg::Int(values.len() as i64)],
            );
            let want = decode(to, &encode(to, &decode(from, &source)));
            for (i, (got, want)) in decode(to, &out).into_iter().zip(want).enumerate() {
                let same = got.to_bits() == want.to_bits() || (got.is_nan() && want.is_nan());
                assert!(same, "{from:?} to {to:?}: {} becomes {got}, not {want}", values[i]);
            }
        }
    }
}

/// Doubles are rounded to float first, also to a float of 16 bits, as the engine does on a CPU.
#[test]
fn conversions_to_and_from_doubles_are_those_of_the_engine() {
    if !there_is_a_compiler() {
        return;
    }
    // Beside every step of floats, beyond their largest and below their smallest, and what is no number.
    let beside = (0..3000u32).flat_map(|i| {
        let x = f64::from(f32::from_bits(i.wrapping_mul(0x9e37_79b9) & 0x7f7f_ffff));
        [x, x * (1.0 + 1e-9), -x * (1.0 - 1e-9)]
    });
    // Beside the middle of two floats of 16 bits, where it matters that doubles become floats first.
    let middles = [8, 11].into_iter().flat_map(|bits| {
        let odd = (0..64).map(move |i| 1.0 + f64::from(2 * i + 1) * 2f64.powi(-bits));
        odd.flat_map(|middle| [middle - 1e-12, middle, middle + 1e-12])
    });
    let values: Vec<f64> = beside
        .chain(middles)
        .chain([1e300, -1e300, 1e-300, f64::INFINITY, f64::NAN, -0.0, 65519.9])
        .collect();
    let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_ne_bytes()).collect();
    let n = values.len();
    for element in Element::ALL {
        let (mut out, mut back) = (room(element, n), vec![0xa5; 8 * n]);
        let work = Work::Elements(n as u64);
        let count = || Arg::Int(n as i64);
        launch("from_f64", element, work, &mut [Arg::In(&bytes), Arg::Out(&mut out), count()]);
        launch("to_f64", element, work, &mut [Arg::In(&out), Arg::Out(&mut back), count()]);
        let got = back.as_chunks().0.iter().map(|&bytes| f64::from_ne_bytes(bytes));
        for (got, want) in got.zip(decode(element, &encode(element, &values))) {
            let same = got.to_bits() == want.to_bits() || (got.is_nan() && want.is_nan());
            assert!(same, "{element:?}: {got}, not {want}");
        }
    }
}

#[test]
fn runs_that_lie_apart_are_converted_and_what_is_between_stays() {
    if !there_is_a_compiler() {
        return;
    }
    let chunk = Spread::CHUNK as i64;
    // From, to, and how many: of a number, of whole chunks, of some and a rest, at places that 16 bytes divide and others, the last ones
    // first.
    let all =
        [(9000, 8, 1), (0, 16, 2 * chunk), (5000, 4209, 3 * chunk + 5), (12000, 11000, 77), (4100, 10500, 9)];
    let (n_from, n_to) = (13000, 12000);
    for (from, name) in [(Element::Bf16, "spread_from_bf16"), (Element::F16, "spread_from_f16")] {
        let source = encode(from, &random(from, n_from, -4.0, 4.0, 7));
        let values = decode(from, &source);
        for (to, runs) in Element::ALL.into_iter().flat_map(|to| [1, 3, 5].map(|runs| (to, runs))) {
            let before = random(to, n_to, -1.0, 1.0, 8);
            let (mut out, mut want) = (encode(to, &before), before);
            let runs = &all[..runs];
            for &(from, to, len) in runs {
                want[to as usize..][..len as usize].copy_from_slice(&values[from as usize..][..len as usize]);
            }
            let runs = runs.iter().map(|&(from, to, len)| Run { from, to, len: len as usize });
            let spread = Spread::new(runs.collect());
            let (bytes, chunks) = (spread.to_bytes(), spread.chunks());
            launch(
                name,
                to,
                Work::Rows { rows: chunks as u64, width: Spread::CHUNK as u64 },
                &mut [
                    Arg::In(&source),
                    Arg::Out(&mut out),
                    Arg::Struct(bytes.to_vec()),
                    Arg::Int(spread.runs() as i64),
                    Arg::Int(chunks as i64),
                ],
            );
            assert!(out == encode(to, &want), "{from:?} to {to:?}, {spread:?}");
        }
    }
}
