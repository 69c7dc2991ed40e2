//! Batches from samples that are kept as bytes, against the engine's on a CPU, to the bit.

use crate::program::{Arg, launch, there_is_a_compiler};
use crate::values::{decode, encode, floats, room};
use phalanx_cuda::{Element, Framing, Work};
use phalanx_tensor::{Border, Device, Philox, SampleImages, SampleOrder, Tensor};

fn bytes(n: usize) -> Vec<u8> {
    let key = Philox::new(5, 6);
    (0..n as u64).map(|i| key.word(i) as u8).collect()
}

/// A number for each byte of each channel.
fn table(channels: usize) -> Vec<f32> {
    (0..channels * 256).map(|i| i as f32 / 255.0 - 0.4).collect()
}

fn framing(how: &SampleImages, channels_last: bool, order: SampleOrder) -> Framing {
    let [channels, height, width] = how.from;
    Framing {
        channels,
        from: [height, width],
        to: how.size,
        corner: how.corner.map(|place| place as i64),
        reflects: how.border == Border::Reflect,
        crop: how.crop,
        crop_place: how.crop_place,
        flip_below: (how.flip * (1u64 << 32) as f64) as u64,
        flip_place: how.flip_place,
        cutout: how.cutout,
        cutout_place: how.cutout_place,
        channels_last,
        by_number: order == SampleOrder::ByNumber,
    }
}

#[test]
fn images_are_the_engines_bit_by_bit() {
    if !there_is_a_compiler() {
        return;
    }
    let cpu = Device::cpu(1);
    let whole = SampleImages::whole([3, 5, 7]);
    let changed = SampleImages {
        size: [4, 6],
        corner: [-2, -2],
        crop: [6, 6],
        crop_place: 3,
        flip: 0.5,
        flip_place: 1,
        cutout: 3,
        cutout_place: 253,
        ..whole
    };
    // As far beyond that reflections are reflected.
    let reflected =
        SampleImages { size: [19, 33], corner: [-9, -14], border: Border::Reflect, crop: [3, 2], ..changed };
    let line = SampleImages {
        size: [3, 3],
        corner: [-1, -1],
        border: Border::Reflect,
        ..SampleImages::whole([2, 1, 2])
    };
    let grey = SampleImages { cutout: 2, flip: 0.25, ..SampleImages::whole([1, 4, 4]) };
    let words = [0xfedc_ba98_7654_3210u64 as i64, -77, 8, 0, 3, 3, 7, 1, 2, 6, 5, 4];
    for (how, last) in
        [(whole, true), (changed, true), (changed, false), (reflected, true), (line, false), (grey, false)]
    {
        let [channels, ..] = how.from;
        let [kept, table] = [bytes(9 * how.bytes()), bytemuck::cast_slice(&table(channels)).to_vec()];
        let on_cpu = Tensor::from_slice(&cpu, &kept, [kept.len()]);
        let numbers = Tensor::from_slice(&cpu, &words, [words.len()]);
        let looked_up = Tensor::from_slice(&cpu, &floats(&table), [channels, 256]);
        for (order, n) in [SampleOrder::ByNumber, SampleOrder::AsInBatch]
            .map(|order| [0, 1, 9].map(|n| (order, n)))
            .into_iter()
            .flatten()
        {
            let want = on_cpu.sample_images(&numbers, &looked_up, &how, order, n);
            let want = if last { want.permute(&[0, 2, 3, 1]).to_vec::<f32>() } else { want.to_vec() };
            let want: Vec<f64> = want.into_iter().map(f64::from).collect();
            for element in Element::ALL {
                let mut out = room(element, want.len());
                let size = channels * how.size[0] * how.size[1];
                launch(
                    "sample_images",
                    element,
                    Work::Rows { rows: n as u64, width: size as u64 },
                    &mut [
                        Arg::In(&kept),
                        Arg::In(bytemuck::cast_slice(&words)),
                        Arg::In(&table),
                        Arg::Out(&mut out),
                        Arg::Struct(framing(&how, last, order).to_bytes().to_vec()),
                        Arg::Int(9),
                        Arg::Int(n as i64),
                    ],
                );
                assert!(out == encode(element, &want), "{element:?}: {how:?}, {n} {order:?}");
            }
        }
    }
}

#[test]
fn samples_that_are_not_there_are_told_and_read_nothing() {
    if !there_is_a_compiler() {
        return;
    }
    let how = SampleImages::whole([1, 2, 2]);
    let (kept, words) = (bytes(8), [0i64, 0, -1, 2, i64::MAX, 1]);
    let mut out = room(Element::F32, 16);
    launch(
        "sample_images",
        Element::F32,
        Work::Rows { rows: 4, width: 4 },
        &mut [
            Arg::In(&kept),
            Arg::In(bytemuck::cast_slice(&words)),
            Arg::In(bytemuck::cast_slice(&table(1))),
            Arg::Out(&mut out),
            Arg::Struct(framing(&how, false, SampleOrder::ByNumber).to_bytes().to_vec()),
            Arg::Int(2),
            Arg::Int(4),
        ],
    );
    let got = decode(Element::F32, &out);
    assert!(got[..12].iter().all(|x| x.is_nan()) && got[12..].iter().all(|x| x.is_finite()), "{got:?}");
    let [ids, labels] = windows(&kept, &[0, 0, 1, -1, 2], 3, 4, true);
    assert_eq!(ids[..3], kept[4..7].iter().map(|&byte| i64::from(byte)).collect::<Vec<_>>());
    assert_eq!(ids[3..9], [-1, -1, -1, -1, -1, -1]);
    assert_eq!(labels[..3], kept[5..8].iter().map(|&byte| i64::from(byte)).collect::<Vec<_>>());
}

fn windows(kept: &[u8], words: &[i64], window: usize, stride: usize, by_number: bool) -> [Vec<i64>; 2] {
    let n = words.len() - 2;
    let [mut ids, mut labels] = [(); 2].map(|()| vec![7i64; n * window]);
    launch(
        "sample_windows",
        Element::F32,
        Work::Elements((n * window) as u64),
        &mut [
            Arg::In(kept),
            Arg::In(bytemuck::cast_slice(words)),
            Arg::Out(bytemuck::cast_slice_mut(&mut ids)),
            Arg::Out(bytemuck::cast_slice_mut(&mut labels)),
            Arg::Int(window as i64),
            Arg::Int(stride as i64),
            Arg::Int(i64::from(by_number)),
            Arg::Int(kept.len() as i64),
            Arg::Int(n as i64),
        ],
    );
    [ids, labels]
}

#[test]
fn windows_are_the_engines() {
    if !there_is_a_compiler() {
        return;
    }
    let cpu = Device::cpu(1);
    let kept = bytes(101);
    let words = [0i64, 0, 8, 0, 3, 3, 9, 1];
    let on_cpu = Tensor::from_slice(&cpu, &kept, [kept.len()]);
    let numbers = Tensor::from_slice(&cpu, &words, [words.len()]);
    for (window, stride, order) in
        [(10, 10, SampleOrder::ByNumber), (10, 11, SampleOrder::AsInBatch), (1, 1, SampleOrder::ByNumber)]
    {
        let want = on_cpu.sample_windows(&numbers, window, stride, order, 6).map(|t| t.to_vec::<i64>());
        assert_eq!(windows(&kept, &words, window, stride, order == SampleOrder::ByNumber), want);
    }
}
