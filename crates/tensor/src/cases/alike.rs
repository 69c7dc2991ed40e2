//! What every device has to the bit as a CPU has it, or nearly: random numbers, targets, running statistics, batches from bytes, and what is
//! done to an arena as a whole. Each of these panics where a device has it otherwise.

use super::{labels, random};
use crate::{Border, DType, Device, Philox, Running, SampleImages, SampleOrder, Tensor, Then};

/// What both come to, `f` on the device and on a CPU. Panics where two numbers are further apart than `by`.
#[track_caller]
fn alike(what: &str, device: &Device, by: f32, f: impl Fn(&Device) -> Tensor) {
    let [got, want] = [device, &Device::cpu(1)].map(|device| f(device).cast(DType::F32).to_vec::<f32>());
    assert_eq!(got.len(), want.len(), "{what}");
    for (i, (got, want)) in got.iter().zip(&want).enumerate() {
        let is_near = got.to_bits() == want.to_bits() || (got - want).abs() <= by;
        assert!(is_near, "{what}: number {i} is {got}, {want} on a CPU");
    }
}

/// Random numbers.
pub fn random_numbers(device: &Device) {
    let key = Philox::new(7, 3);
    alike("uniform", device, 0.0, |on| Tensor::uniform(on, [1003], -1.0, 3.0, DType::F32, key));
    // A logarithm, a root and a cosine, of numbers that go up to 6.
    alike("normal", device, 1e-5, |on| Tensor::normal(on, [1003], 0.0, 1.0, DType::F32, key));
}

/// Classes as targets, and the largest of rows.
pub fn targets(device: &Device) {
    alike("one_hot", device, 0.0, |on| labels(on, 9, 20).one_hot(3..17, 20, DType::F32));
    alike("argmax", device, 0.0, |on| {
        let x = Tensor::uniform(on, [9, 300], -1.0, 1.0, DType::F32, Philox::new(1, 1));
        let found: Vec<f32> = x.argmax(1).to_vec::<i64>().iter().map(|&i| i as f32).collect();
        Tensor::from_slice(on, &found, [9])
    });
}

/// Running statistics, of few values a channel and of many.
pub fn running_statistics(device: &Device) {
    for shape in [[4, 16, 5, 5], [8, 24, 17, 17], [2, 5, 3, 1]] {
        alike("running statistics", device, 1e-6, |on| {
            let x = random(&Tensor::zeros(on, [], DType::F32), &shape, 1);
            let [mean, variance] = [0.5, 2.0].map(|value| {
                let tensor = Tensor::zeros(on, [shape[1]], DType::F32);
                tensor.fill(value);
                tensor
            });
            let running = Running { mean: &mean, variance: &variance, share: 0.1 };
            for _ in 0..2 {
                x.batch_norm(None, None, 1e-5, Then::Nothing, None, Some(running));
            }
            Tensor::cat(&[&mean, &variance], 0)
        });
    }
}

/// Images and windows of a text, as bytes, with all that is done to them.
pub fn batches_from_bytes(device: &Device) {
    let bytes: Vec<u8> = (0..4 * 3 * 10 * 9u32).map(|i| (i * 37 % 251) as u8).collect();
    let words = [42i64, 5, 3, 0, 2, 1, 3];
    let whole = SampleImages::whole([3, 10, 9]);
    let changed = SampleImages {
        size: [8, 7],
        corner: [-1, 2],
        crop: [5, 4],
        flip: 0.5,
        flip_place: 2,
        cutout: 3,
        cutout_place: 3,
        ..whole
    };
    let of = |on: &Device| {
        (Tensor::from_slice(on, &bytes, [bytes.len()]), Tensor::from_slice(on, &words, [words.len()]))
    };
    let reflected = SampleImages { corner: [-2, -2], border: Border::Reflect, ..changed };
    for how in [whole, changed, reflected] {
        alike("sample_images", device, 0.0, |on| {
            let table: Vec<f32> = (0..3 * 256).map(|i| i as f32 / 300.0 - 1.0).collect();
            let (bytes, words) = of(on);
            let table = Tensor::from_slice(on, &table, [3, 256]);
            bytes.sample_images(&words, &table, &how, SampleOrder::ByNumber, 5)
        });
    }
    alike("sample_windows", device, 0.0, |on| {
        let (bytes, words) = of(on);
        let [ids, next] = bytes.sample_windows(&words, 33, 16, SampleOrder::ByNumber, 5);
        let all = [ids, next].map(|t| t.to_vec::<i64>()).concat();
        Tensor::from_slice(on, &all.iter().map(|&id| id as f32).collect::<Vec<f32>>(), [all.len()])
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    #[test]
    #[should_panic(expected = "something: number 1 is 3")]
    fn what_is_otherwise_is_told() {
        let calls = Cell::new(0.0);
        alike("something", &Device::cpu(1), 0.5, |on| {
            calls.set(calls.get() + 1.0);
            Tensor::from_slice(on, &[1.0f32, 3.0 / calls.get()], [2])
        });
    }
}
