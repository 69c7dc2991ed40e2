//! Random numbers and dropout against the engine's, bit by bit.

use crate::program::{Arg, launch, run_trial, there_is_a_compiler, trial};
use crate::values::{SIZES, decode, encode, floats, random, room};
use phalanx_cuda::{Element, Work};
use phalanx_tensor::{DType, Device, DropoutKey, Philox, Tensor};

/// Seeds and streams with all of their bits.
const KEYS: [[u64; 2]; 3] = [[0, 0], [7, 1], [0xfedc_ba98_7654_3210, u64::MAX - 5]];

fn key([seed, stream]: [u64; 2]) -> [Arg<'static>; 2] {
    [Arg::Int(seed as i64), Arg::Int(stream as i64)]
}

/// Runs a kernel that fills `n` numbers from a key and some constants.
fn filled(kernel: &str, element: Element, n: usize, keys: [u64; 2], constants: Vec<Arg<'_>>) -> Vec<u8> {
    let mut out = room(element, n);
    let mut args = vec![Arg::Out(&mut out)];
    args.extend(key(keys));
    args.extend(constants);
    args.push(Arg::Int(n as i64));
    launch(kernel, element, Work::Elements(n as u64), &mut args);
    out
}

#[test]
fn words_are_the_engines_with_all_of_their_bits() {
    if !there_is_a_compiler() {
        return;
    }
    let kernel = "extern \"C\" __global__ void words(u32 *out, i64 seed, i64 stream, i64 first, i64 n) {
        for (i64 i = first_element(); i < n; i += all_threads()) {
            const Words words = philox((u64)seed, (u64)stream, (u64)first + (u64)i);
            for (int j = 0; j < 4; j++) out[4 * i + j] = words.word[j];
        }
    }";
    let program = trial("words", kernel, &["words"]);
    let n = 500;
    for (keys, first) in
        KEYS.into_iter().flat_map(|keys| [0, u64::from(u32::MAX) - 100, u64::MAX - 100].map(|at| (keys, at)))
    {
        let mut out = vec![0; n * 16];
        let mut args = vec![Arg::Out(&mut out)];
        args.extend(key(keys));
        args.extend([Arg::Int(first as i64), Arg::Int(n as i64)]);
        run_trial(&program, "words", 64, &mut args).unwrap();
        let philox = Philox::new(keys[0], keys[1]);
        let want: Vec<u32> = (0..n as u64).flat_map(|i| philox.block(first.wrapping_add(i))).collect();
        let got: Vec<u32> = out.chunks_exact(4).map(bytemuck::pod_read_unaligned).collect();
        assert!(got == want, "{keys:?} from {first}");
    }
    std::fs::remove_file(program).unwrap();
}

#[test]
fn even_numbers_are_the_engines_bit_by_bit() {
    if !there_is_a_compiler() {
        return;
    }
    for (keys, n) in KEYS.into_iter().flat_map(|keys| SIZES.map(|n| (keys, n))) {
        for [low, high] in [[0.0, 1.0], [-0.1, 0.3], [1.0, 1.0000002]] {
            let constants = || {
                let largest = (high as f32).next_down().max(low as f32);
                vec![Arg::Double(low), Arg::Double(high), Arg::Float(largest)]
            };
            let got = filled("uniform", Element::F32, n, keys, constants());
            let key = Philox::new(keys[0], keys[1]);
            let want = Tensor::uniform(&Device::cpu(1), [n], low, high, DType::F32, key).to_vec::<f32>();
            assert!(floats(&got) == want, "{keys:?}, {n} in {low}..{high}");
        }
    }
}

#[test]
fn even_numbers_of_short_types_stay_below_the_end() {
    if !there_is_a_compiler() {
        return;
    }
    for (element, largest) in [(Element::Bf16, 1.0 - 1.0 / 256.0f32), (Element::F16, 1.0 - 1.0 / 2048.0)] {
        let constants = vec![Arg::Double(0.0), Arg::Double(1.0), Arg::Float(largest)];
        let got = decode(element, &filled("uniform", element, 20_000, [3, 4], constants));
        let most = got.iter().copied().fold(0.0, f64::max);
        assert!(most == f64::from(largest) && got.iter().all(|x| *x >= 0.0), "{element:?}: {most}");
    }
}

#[test]
fn first_values_are_the_engines_bit_by_bit() {
    if !there_is_a_compiler() {
        return;
    }
    for (keys, n) in KEYS.into_iter().flat_map(|keys| SIZES.map(|n| (keys, n))) {
        for std in [1.0, 0.02] {
            let mut want = vec![0.0; n];
            Philox::new(keys[0], keys[1]).fill_normal(&Device::cpu(1), std, &mut want);
            let got = filled("fill_normal", Element::F32, n, keys, vec![Arg::Double(std)]);
            assert!(floats(&got) == want, "{keys:?}, {n} of {std}");
            let rounded: Vec<f64> = want.iter().map(|&x| f64::from(x)).collect();
            for element in [Element::Bf16, Element::F16] {
                let got = filled("fill_normal", element, n, keys, vec![Arg::Double(std)]);
                assert!(got == encode(element, &rounded), "{element:?}: {keys:?}, {n} of {std}");
            }
        }
    }
}

#[test]
fn normal_numbers_are_the_engines_to_the_last_place() {
    if !there_is_a_compiler() {
        return;
    }
    for keys in KEYS {
        let n = 1999;
        let key = Philox::new(keys[0], keys[1]);
        let want = Tensor::normal(&Device::cpu(1), [n], 0.5, 2.0, DType::F32, key).to_vec::<f32>();
        let got = floats(&filled("normal", Element::F32, n, keys, vec![Arg::Double(0.5), Arg::Double(2.0)]));
        for (got, want) in got.into_iter().zip(want) {
            assert!(got >= want.next_down() && got <= want.next_up(), "{keys:?}: {got}, not {want}");
        }
    }
}

#[test]
fn dropout_drops_what_the_engine_drops() {
    if !there_is_a_compiler() {
        return;
    }
    for (n, width) in [(1, 1), (3, 7), (5, 1003), (2, 4), (0, 3)] {
        for p in [0.1, 0.5, 0.999] {
            let samples: Vec<u64> = (0..n as u64).map(|i| i * i * 0x1_0000_0001 + 3).collect();
            let key = DropoutKey::new(KEYS[2][0], 1 << 40, 3, samples.clone().into());
            let values = random(Element::F32, n * width, -1.0, 1.0, 1);
            let x: Vec<f32> = values.iter().map(|&x| x as f32).collect();
            let want = Tensor::from_slice(&Device::cpu(1), &x, [n, width]).dropout(p, &key).to_vec::<f32>();
            let words = [key.seed, key.step, key.layer];
            let constants = || {
                let threshold = (p * f64::from(u32::MAX)) as u32;
                let keep = (1.0 / (1.0 - p)) as f32;
                let n = [n, width].map(|n| Arg::Int(n as i64));
                n.into_iter().chain([Arg::Int(i64::from(threshold)), Arg::Float(keep)])
            };
            let work = Work::Elements((n * width.div_ceil(4)) as u64);
            let (mut mask, mut out) = (room(Element::F32, n * width), room(Element::F32, n * width));
            let keys = || [Arg::In(bytemuck::cast_slice(&words)), Arg::In(bytemuck::cast_slice(&samples))];
            let mut args: Vec<Arg<'_>> =
                [Arg::Out(&mut mask)].into_iter().chain(keys()).chain(constants()).collect();
            launch("dropout_mask", Element::F32, work, &mut args);
            let given = encode(Element::F32, &values);
            let both = [Arg::In(&given), Arg::Out(&mut out)];
            let mut args: Vec<Arg<'_>> = both.into_iter().chain(keys()).chain(constants()).collect();
            launch("dropout", Element::F32, work, &mut args);
            assert!(floats(&out) == want, "{n} x {width}, {p}");
            let masked: Vec<f32> = floats(&mask).iter().zip(&x).map(|(mask, x)| mask * x).collect();
            assert!(masked == want, "{n} x {width}, {p}: the mask");
        }
    }
}
