//! A GPU to test on, and the few lines that tests share.

use phalanx_cuda::{KERNELS, Source};
use phalanx_fake_cuda::{FakeCuda, Module};
use phalanx_tensor::cases::{Check, random};
use phalanx_tensor::{DType, Device, GpuOptions, Gradients, Tensor, backward};
use std::ops::Deref;
use std::path::Path;

/// A GPU, and the fake driver that it is of, unless it is a real one.
pub(crate) struct Rig {
    // Closed before its driver is.
    device: Option<Device>,
    fake: Option<FakeCuda>,
}

/// A GPU of a test's own, whose streams go on as `seed` says; none, said aloud, where there is none to be had.
pub(crate) fn rig(seed: u64) -> Option<Rig> {
    if let Ok(named) = std::env::var("PHALANX_TEST_GPU") {
        let index = named
            .parse()
            .unwrap_or_else(|_| panic!("PHALANX_TEST_GPU={named}: the number of a GPU would do"));
        let libraries = std::env::var_os("PHALANX_TEST_CUDA_LIBRARIES");
        let libraries = libraries.iter().flat_map(std::env::split_paths).collect();
        let options = GpuOptions { libraries, ..GpuOptions::default() };
        let device = Device::cuda(index, &options).unwrap_or_else(|error| panic!("{error}"));
        return Some(Rig { device: Some(device), fake: None });
    }
    let modules = Source::ALL.into_iter().flat_map(|source| {
        source.elements().iter().map(move |element| Module {
            file: source.file(),
            element: element.in_source(),
            kernels: KERNELS
                .iter()
                .filter(|kernel| kernel.source == source)
                .map(|kernel| kernel.name)
                .collect(),
        })
    });
    let kernels = Path::new(env!("CARGO_MANIFEST_DIR")).join("../cuda/kernels");
    let fake = FakeCuda::new(Path::new(env!("CARGO_TARGET_TMPDIR")), &kernels, &modules.collect::<Vec<_>>())?;
    fake.seed(seed);
    let options = GpuOptions { libraries: vec![fake.folder().to_owned()], ..GpuOptions::default() };
    let device = Device::cuda(0, &options).unwrap_or_else(|error| panic!("{error}"));
    Some(Rig { device: Some(device), fake: Some(fake) })
}

impl Rig {
    /// The fake driver; none, said aloud, where the GPU is a real one.
    pub(crate) fn fake(&self) -> Option<&FakeCuda> {
        if self.fake.is_none() {
            eprintln!("skipped: a real GPU counts nothing");
        }
        self.fake.as_ref()
    }
}

impl Deref for Rig {
    type Target = Device;
    fn deref(&self) -> &Device {
        self.device.as_ref().expect("a rig has its device until it is dropped")
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        self.device = None;
        if let (Some(fake), false) = (&self.fake, std::thread::panicking()) {
            assert_eq!(fake.damage(), [""; 0]);
        }
    }
}

/// What a result in float32 may be off by: a hundred roundings of the largest number that takes part, which the sums of the cases
/// stay far below.
pub(crate) const TOLERANCE: f64 = 100.0 * f32::EPSILON as f64;

/// Compares results of a GPU with those of a CPU, relative to the largest of them and 1.
#[track_caller]
pub(crate) fn near(what: &str, got: &[f32], want: &[f64]) {
    assert_eq!(got.len(), want.len(), "{what}: how many there are");
    let scale = want.iter().filter(|x| x.is_finite()).fold(1.0, |scale: f64, x| scale.max(x.abs()));
    for (i, (&got, &want)) in got.iter().zip(want).enumerate() {
        let got = f64::from(got);
        let same = got == want || (got.is_nan() && want.is_nan()) || (got - want).abs() <= TOLERANCE * scale;
        assert!(same, "{what}, {i}: {got}, not {want} (within {:e})", TOLERANCE * scale);
    }
}

/// Compares outputs and gradients in float32 with those of a CPU in float64 from the same numbers.
impl Check for Rig {
    #[track_caller]
    fn check_at(&self, shift: f64, shapes: &[&[usize]], f: &dyn Fn(&[Tensor]) -> Tensor) {
        let cpu = Device::cpu(1);
        let single = |device: &Device| Tensor::zeros(device, [], DType::F32);
        let values: Vec<Vec<f32>> =
            (0..).zip(shapes).map(|(i, shape)| (random(&single(&cpu), shape, i) + shift).to_vec()).collect();
        let run = |leaves: &[Tensor], like: &Tensor| {
            let out = f(leaves);
            let weights = random(like, out.dims(), 99);
            let mut grads = Gradients::default();
            backward(&[(&out, Some(&weights))], &mut grads);
            let all = leaves.iter().map(|leaf| grads.get(leaf).expect("each input gets a gradient").clone());
            [out.detach()].into_iter().chain(all).collect::<Vec<Tensor>>()
        };
        let double: Vec<Tensor> = values
            .iter()
            .zip(shapes)
            .map(|(values, shape)| {
                let values: Vec<f64> = values.iter().map(|&x| f64::from(x)).collect();
                Tensor::from_slice(&cpu, &values, *shape).requires_grad()
            })
            .collect();
        let want = run(&double, &Tensor::zeros(&cpu, [], DType::F64));
        let ours: Vec<Tensor> = values
            .iter()
            .zip(shapes)
            .map(|(values, shape)| Tensor::from_slice(self, values, *shape).requires_grad())
            .collect();
        let got = run(&ours, &single(self));
        for (i, (got, want)) in got.iter().zip(&want).enumerate() {
            let what = if i == 0 { "output".to_owned() } else { format!("gradient of input {}", i - 1) };
            assert_eq!(got.dims(), want.dims(), "{what}");
            near(&format!("{what}, shapes {shapes:?}"), &got.to_vec::<f32>(), &want.to_vec::<f64>());
        }
    }
}
