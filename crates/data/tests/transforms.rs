//! Transforms: torchvision's results, each sample a function of seed, epoch and number, and what is done about bad images.

use phalanx_data::{
    BadImages, BatchBuffers, Border, COLOURS, Dataset, Error, ExactSampler, Image, Images, Jitter, Loader,
    LoaderOptions, Normalise, Order, Pictures, Pipeline, Result, Target, Transform,
};
use std::path::{Path, PathBuf};

/// Images of random bytes, some of them bad.
struct Noise {
    n: usize,
    size: [usize; 2],
    bad: &'static [usize],
}

impl Noise {
    fn new(n: usize, size: [usize; 2]) -> Noise {
        Noise { n, size, bad: &[] }
    }
}

impl Images for Noise {
    fn len(&self) -> usize {
        self.n
    }

    fn classes(&self) -> usize {
        5
    }

    fn size(&self) -> Option<[usize; 2]> {
        Some(self.size)
    }

    fn label(&self, i: usize) -> Result<usize> {
        Ok(i % 5)
    }

    fn image<'a>(&'a self, i: usize, room: &'a mut Vec<u8>) -> Result<Image<'a>> {
        if self.bad.contains(&i) {
            return Err(Error::Image { path: PathBuf::from(format!("{i}.png")), reason: "is torn".into() });
        }
        let [height, width] = self.size;
        let random = phalanx_tensor::Philox::new(9, i as u64);
        room.clear();
        room.extend((0..(COLOURS * height * width) as u64).map(|k| (random.word(k) >> 24) as u8));
        Ok(Image { height, width, bytes: room })
    }
}

/// The same image, any number of times.
struct Repeated {
    n: usize,
    size: [usize; 2],
    bytes: Vec<u8>,
}

impl Images for Repeated {
    fn len(&self) -> usize {
        self.n
    }

    fn classes(&self) -> usize {
        2
    }

    fn size(&self) -> Option<[usize; 2]> {
        Some(self.size)
    }

    fn label(&self, _i: usize) -> Result<usize> {
        Ok(0)
    }

    fn image<'a>(&'a self, _i: usize, _room: &'a mut Vec<u8>) -> Result<Image<'a>> {
        Ok(Image { height: self.size[0], width: self.size[1], bytes: &self.bytes })
    }
}

fn pipeline(steps: &[Transform]) -> Pipeline {
    Pipeline { steps: steps.to_vec(), ..Pipeline::new(Normalise::UNIT) }
}

/// The bytes that come out for each sample of epoch 0, with a pipeline that normalises to units.
fn bytes_of(images: impl Images, pipeline: Pipeline) -> Vec<Vec<u8>> {
    let n = images.len();
    let pictures = Pictures::new(images, pipeline, 3, BadImages::Refuse).unwrap();
    let mut buffers = BatchBuffers::new();
    buffers.fit(&pictures, n);
    pictures.batch(&(0..n).collect::<Vec<_>>(), &mut buffers).unwrap();
    let size = buffers.inputs().len() / n;
    let byte = |x: &f32| {
        let byte = (x * 255.0).round();
        assert!((x * 255.0 - byte).abs() < 1e-4, "{x} is no byte");
        byte as u8
    };
    buffers.inputs().chunks_exact(size).map(|image| image.iter().map(byte).collect()).collect()
}

/// Height, width and planes of the picture that `golden/make.py` resizes.
fn golden_picture() -> Repeated {
    let file = std::fs::read(golden("picture.npy")).unwrap();
    let (height, width) = (37, 53);
    let pixels = &file[file.len() - COLOURS * height * width..];
    let bytes =
        (0..COLOURS).flat_map(|colour| pixels.iter().copied().skip(colour).step_by(COLOURS)).collect();
    Repeated { n: 1, size: [height, width], bytes }
}

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name)
}

/// Height, width and the fold of the result, and shorter side, height and width: printed by `golden/make.py`.
const RESIZED: &[(usize, usize, u64)] = &[
    (37, 53, 0x8784198d91d55950),
    (74, 106, 0x92e3526ee5ad352c),
    (224, 224, 0x47bae52fc214e7bb),
    (8, 8, 0x4b53530fc5a70c8a),
    (1, 1, 0x193fb),
    (100, 3, 0xd71200ae5ff9fe6c),
    (36, 52, 0x15f3364c349a04c7),
];
const SHORTER: &[(usize, usize, usize)] = &[(10, 10, 14), (37, 37, 53), (64, 64, 91)];

#[test]
fn resized_images_are_pillows_bit_for_bit() {
    let fold =
        |bytes: &[u8]| bytes.iter().fold(0u64, |h, &byte| h.wrapping_mul(31).wrapping_add(u64::from(byte)));
    for &(height, width, expected) in RESIZED {
        let out = bytes_of(golden_picture(), pipeline(&[Transform::Resize([height, width])]));
        assert_eq!(fold(&out[0]), expected, "{height}x{width}");
    }
    for &(side, height, width) in SHORTER {
        let pictures = Pictures::new(
            golden_picture(),
            pipeline(&[Transform::ResizeShorter(side)]),
            0,
            BadImages::Refuse,
        );
        assert_eq!(pictures.unwrap().input_dims(), [COLOURS, height, width]);
    }
}

#[test]
fn numbers_are_torchvisions_bit_for_bit() {
    // torch.tensor(bytes).float().div(255).sub(mean).div(std), as for MNIST.
    let image = Repeated { n: 1, size: [1, 2], bytes: vec![0, 255, 77, 128, 200, 1] };
    let pictures = Pictures::new(image, Pipeline::new(Normalise::IMAGENET), 0, BadImages::Refuse).unwrap();
    let mut buffers = BatchBuffers::new();
    buffers.fit(&pictures, 1);
    pictures.batch(&[0], &mut buffers).unwrap();
    let bits: Vec<u32> = buffers.inputs().iter().map(|x| x.to_bits()).collect();
    assert_eq!(bits, NUMBERS);
}

/// Printed by `golden/make.py`.
const NUMBERS: [u32; 6] = [0xc0078bbd, 0x400fee1d, 0xbf300b78, 0x3e521b48, 0x3fd737ef, 0xbfe4bcea];

#[test]
fn flips_and_crops_are_as_likely_as_they_say() {
    // One bright pixel in the middle of 3x3, and where it goes.
    let mut bytes = vec![0; 27];
    bytes[4] = 255;
    let image = Repeated { n: 9000, size: [3, 3], bytes };
    let crop = Transform::RandomCrop { padding: 1, border: Border::Black, size: [3, 3] };
    let mut counts = [0usize; 9];
    for out in bytes_of(image, pipeline(&[crop])) {
        let places: Vec<usize> = (0..27).filter(|&i| out[i] > 0).collect();
        assert_eq!(places.len(), 1);
        counts[places[0]] += 1;
    }
    assert!(counts.iter().all(|count| (850..1150).contains(count)), "{counts:?}");
    let left = Repeated { n: 4000, size: [1, 2], bytes: vec![255, 0, 255, 0, 255, 0] };
    for chance in [0.0, 0.25, 1.0] {
        let flipped = bytes_of(
            Repeated { n: left.n, size: left.size, bytes: left.bytes.clone() },
            pipeline(&[Transform::Flip { chance }]),
        );
        let share = flipped.iter().filter(|out| out[0] == 0).count() as f64 / 4000.0;
        assert!((share - chance).abs() < 0.02, "{share} instead of {chance}");
        assert!(flipped.iter().all(|out| out[..2] == out[2..4] && out[..2] == out[4..]));
    }
}

#[test]
fn the_middle_is_cut_out_and_small_images_are_padded() {
    let image = || Repeated { n: 1, size: [2, 4], bytes: (1..=24).collect() };
    let centre = |size| bytes_of(image(), pipeline(&[Transform::CentreCrop(size)])).remove(0);
    assert_eq!(centre([2, 2])[..4], [2, 3, 6, 7]);
    assert_eq!(centre([4, 2])[..8], [0, 0, 2, 3, 6, 7, 0, 0]);
    // What was cut away does not come back as padding.
    let steps = [Transform::CentreCrop([2, 2]), Transform::CentreCrop([2, 4])];
    assert_eq!(bytes_of(image(), pipeline(&steps))[0][..8], [0, 2, 3, 0, 0, 6, 7, 0]);
}

#[test]
fn what_lies_around_an_image_is_black_or_its_reflection() {
    let image = || Repeated { n: 1, size: [2, 3], bytes: (1..=18).collect() };
    // As large as the image with what is around it, so there is one place for it.
    let around = |border, size| Transform::RandomCrop { padding: 1, border, size };
    let seen = |steps: &[Transform]| bytes_of(image(), pipeline(steps)).remove(0)[..].to_vec();
    let (small, large) = ([4, 5], [6, 7]);
    let reflected = around(Border::Reflect, small);
    assert_eq!(seen(&[reflected])[..20], [5, 4, 5, 6, 5, 2, 1, 2, 3, 2, 5, 4, 5, 6, 5, 2, 1, 2, 3, 2]);
    let both = seen(&[reflected, Transform::Flip { chance: 1.0 }, around(Border::Black, large)]);
    let rows = [[0; 7], [0, 5, 6, 5, 4, 5, 0], [0, 2, 3, 2, 1, 2, 0]];
    assert_eq!(both[..42], [rows[0], rows[1], rows[2], rows[1], rows[2], rows[0]].concat());
    let both = seen(&[around(Border::Black, small), around(Border::Reflect, large)]);
    let rows = [[0; 7], [1, 0, 1, 2, 3, 0, 3], [4, 0, 4, 5, 6, 0, 6]];
    assert_eq!(both[..42], [rows[1], rows[0], rows[1], rows[2], rows[0], rows[2]].concat());
}

#[test]
fn cutout_leaves_a_square_of_zeros() {
    let white = Repeated { n: 500, size: [8, 6], bytes: vec![255; 3 * 48] };
    let mut whole = 0;
    for out in bytes_of(white, Pipeline { cutout: 4, ..pipeline(&[]) }) {
        let cut: Vec<usize> = (0..48).filter(|&i| out[i] == 0).collect();
        assert!((4..=16).contains(&cut.len()), "{} pixels", cut.len());
        let (top, left) = (cut[0] / 6, cut.iter().map(|i| i % 6).min().unwrap());
        let (bottom, right) = (cut[cut.len() - 1] / 6, cut.iter().map(|i| i % 6).max().unwrap());
        assert_eq!(cut.len(), (bottom - top + 1) * (right - left + 1), "a rectangle");
        assert!((0..COLOURS).all(|colour| cut.iter().all(|i| out[colour * 48 + i] == 0)));
        whole += usize::from(cut.len() == 16);
    }
    assert!(whole > 100, "{whole} squares lie within the image");
}

#[test]
fn random_pieces_keep_to_their_bounds() {
    // Each pixel's value is its place, so that a piece that is not resized would show where it was cut.
    let (area, ratio) = ((0.08, 1.0), (3.0 / 4.0, 4.0 / 3.0));
    let piece = Transform::RandomResizedCrop { size: [16, 16], area, ratio };
    let outs = bytes_of(Noise::new(200, [40, 30]), pipeline(&[piece]));
    assert!(outs.iter().all(|out| out.len() == COLOURS * 256));
    let gradient: Vec<u8> = (0..COLOURS * 100 * 100).map(|i| (i % 100 * 2) as u8).collect();
    let image = Repeated { n: 300, size: [100, 100], bytes: gradient };
    let widths: Vec<u8> = bytes_of(image, pipeline(&[piece])).iter().map(|out| out[15] - out[0]).collect();
    let (narrow, wide) = (widths.iter().min().unwrap(), widths.iter().max().unwrap());
    // Widths from the root of 0.08 * 3/4 to all, in steps of 2 and without half a pixel of the result at both ends.
    assert!((40..60).contains(narrow) && *wide > 170, "{narrow} to {wide}");
    // A strip that no piece of these shapes fits gives its middle.
    let strip = Repeated { n: 20, size: [2, 100], bytes: vec![9; COLOURS * 200] };
    assert!(bytes_of(strip, pipeline(&[piece])).iter().flatten().all(|&byte| byte == 9));
}

/// Everything at once.
fn rich(mixup: f64) -> Pipeline {
    Pipeline {
        steps: vec![
            Transform::RandomResizedCrop { size: [12, 12], area: (0.3, 1.0), ratio: (0.75, 1.33) },
            Transform::RandomCrop { padding: 2, border: Border::Black, size: [10, 10] },
            Transform::Flip { chance: 0.5 },
            Transform::Jitter(Jitter { brightness: 0.4, contrast: 0.4, saturation: 0.4, hue: 0.1 }),
        ],
        normalise: Normalise::CIFAR10,
        cutout: 3,
        mixup,
    }
}

/// What each sample of an epoch becomes, for one rank of `world_size` after the other.
fn seen(threads: usize, world_size: usize, batch_size: usize, epoch: u64, seed: u64) -> Vec<(u64, Vec<u32>)> {
    let mut all = Vec::new();
    for rank in 0..world_size {
        let order = Order::Shuffled { seed: 2 };
        let sampler = ExactSampler { len: 41, world_size, rank, batch_size, order };
        let noise = Noise { bad: &[7, 8, 40], ..Noise::new(41, [13, 17]) };
        let pictures = Pictures::new(noise, rich(0.5), seed, BadImages::Replace).unwrap();
        let loader = Loader::new(pictures, sampler, LoaderOptions { threads, ..LoaderOptions::default() });
        for batch in loader.epoch(epoch).unwrap() {
            let batch = batch.unwrap();
            let size = batch.inputs().len() / batch.len().max(1);
            for (slot, &id) in batch.sample_ids().iter().enumerate() {
                let numbers =
                    [&batch.inputs()[slot * size..][..size], &batch.values()[slot * 5..][..5]].concat();
                all.push((id, numbers.iter().map(|x| x.to_bits()).collect()));
            }
        }
    }
    all.sort();
    all
}

#[test]
fn a_sample_is_the_same_on_any_number_of_threads_and_ranks() {
    let alone = seen(0, 1, 8, 3, 1);
    assert_eq!(alone.len(), 41);
    for (threads, world_size, batch_size) in [(1, 1, 8), (3, 1, 5), (0, 2, 4), (2, 3, 1), (7, 5, 100)] {
        assert!(
            seen(threads, world_size, batch_size, 3, 1) == alone,
            "{threads} threads, {world_size} ranks of {batch_size}"
        );
    }
    let differ = |other: Vec<(u64, Vec<u32>)>| alone.iter().zip(&other).filter(|(a, b)| a.1 != b.1).count();
    assert_eq!(differ(seen(0, 1, 8, 4, 1)), 41, "another epoch");
    assert_eq!(differ(seen(0, 1, 8, 3, 2)), 41, "another seed");
}

#[test]
fn mixtures_are_weighted_sums_of_images_and_classes() {
    // As many classes as images, so that the shares name the partner.
    let plain = Pictures::new(Noise::new(5, [4, 4]), pipeline(&[]), 1, BadImages::Refuse).unwrap();
    let mixed = Pipeline { mixup: 1.0, ..pipeline(&[]) };
    let mixed = Pictures::new(Noise::new(5, [4, 4]), mixed, 1, BadImages::Refuse).unwrap();
    assert_eq!((plain.target(), mixed.target()), (Target::Classes(5), Target::Values(&[5])));
    let indices: Vec<usize> = (0..5).cycle().take(50).collect();
    let all = |pictures: &dyn Dataset, indices: &[usize]| {
        let mut buffers = BatchBuffers::new();
        buffers.fit(pictures, indices.len());
        pictures.batch(indices, &mut buffers).unwrap();
        (buffers.inputs().to_vec(), buffers.values().to_vec())
    };
    let ((plain, _), (inputs, shares)) = (all(&plain, &indices[..5]), all(&mixed, &indices));
    let mut partners = 0;
    for (slot, &i) in indices.iter().enumerate() {
        let shares = &shares[slot * 5..][..5];
        assert!((shares.iter().sum::<f32>() - 1.0).abs() < 1e-6, "{shares:?}");
        let others = (0..5).filter(|&other| other != i && shares[other] > 0.0);
        assert!(others.clone().count() <= 1, "{shares:?}");
        partners += others.count();
        for (pixel, &found) in inputs[slot * 48..][..48].iter().enumerate() {
            let sum: f32 = (0..5).map(|other| shares[other] * plain[other * 48 + pixel]).sum();
            assert!((sum - found).abs() < 1e-6, "sample {i}: {shares:?}");
        }
    }
    assert!(partners > 0, "every sample was mixed with itself");
}

#[test]
fn bad_images_are_refused_or_replaced_by_the_next_good_one_and_counted() {
    let noise = || Noise { bad: &[2, 3, 9], ..Noise::new(10, [4, 4]) };
    let open = |bad| Pictures::new(noise(), pipeline(&[]), 1, bad).unwrap();
    let sampler = ExactSampler { len: 10, world_size: 1, rank: 0, batch_size: 10, order: Order::Stored };
    let first = |bad| {
        let loader = Loader::new(open(bad), sampler, LoaderOptions::default());
        loader.epoch(0).unwrap().next().unwrap()
    };
    let error = first(BadImages::Refuse).unwrap_err().to_string();
    assert!(error.starts_with("2.png: is torn") && error.contains("--skip-bad"), "{error}");
    let batch = first(BadImages::Replace).unwrap();
    assert_eq!(batch.skipped(), 3);
    assert_eq!(batch.labels(), [0, 1, 4, 4, 4, 0, 1, 2, 3, 0], "2 and 3 became 4, and 9 became 0");
    let image = |i: usize| &batch.inputs()[i * 48..][..48];
    assert!(image(2) == image(4) && image(3) == image(4) && image(9) == image(0));
    // With none left there is nothing to go on with.
    let hopeless = Noise { bad: &[0, 1], ..Noise::new(2, [4, 4]) };
    let pictures = Pictures::new(hopeless, pipeline(&[]), 1, BadImages::Replace).unwrap();
    let mut buffers = BatchBuffers::new();
    buffers.fit(&pictures, 1);
    assert!(pictures.batch(&[1], &mut buffers).unwrap_err().to_string().contains("is torn"));
}

#[test]
fn pipelines_that_cannot_run_say_why() {
    let crop = |side| Transform::RandomCrop { padding: 1, border: Border::Black, size: [side, side] };
    let jitter = Transform::Jitter(Jitter { hue: 0.6, ..Jitter::default() });
    let rows: &[(Pipeline, &str)] = &[
        (pipeline(&[crop(7)]), "a random crop of 7x7 needs larger images, got: 6x6 with the padding"),
        (pipeline(&[Transform::Resize([0, 4])]), "no image can be left of Resize([0, 4])"),
        (pipeline(&[jitter]), "a hue from 0 to 0.5, got: [0.0, 0.0, 0.0] and 0.6"),
        (Pipeline { mixup: 1.5, ..pipeline(&[]) }, "an alpha from 0 to 1, got: 1.5"),
    ];
    for (pipeline, reason) in rows {
        let error = Pictures::new(Noise::new(1, [4, 4]), pipeline.clone(), 0, BadImages::Refuse);
        let message = error.err().expect(reason).to_string();
        assert!(message.contains(reason) && message.contains("\nhint: "), "{message}");
    }
}
