//! What NVIDIA's own cuDNN makes of our graphs for GPUs that aren't here. From 9.11 on the library proposes engines, and makes plans,
//! for a GPU whose properties it is told, so what is asked of it, and which convolutions it has a way for, shows without one.
//!
//! The library comes with the Python package nvidia-cudnn-cu13; `PHALANX_TEST_CUDA_LIBRARIES` names its folder, among others with `:`
//! between them.

use super::convolution::{Convolution, Layout, Numbers, Pass};
use super::descriptor::{Descriptor, Raw};
use super::foreign::Functions;
use super::has_no_way;
use super::plan::{Plan, Wanted, plans};
use super::target::Target;
use crate::error::Error;
use crate::foreign::headers::libraries;
use crate::foreign::{constants, headers};
use std::path::Path;
use std::process::Command;
use std::sync::{Arc, OnceLock};

constants! {
    GPU "CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR" 38;
    GPU_JSON "CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION" 2702;
    TYPE_CHAR "CUDNN_TYPE_CHAR" 24;
    HEUR_GPU "CUDNN_ATTR_ENGINEHEUR_DEVICEPROP" 204;
    PLAN_GPU "CUDNN_ATTR_EXECUTION_PLAN_DEVICEPROP" 407;
}

#[test]
fn the_numbers_are_those_of_the_header() {
    headers::check("cudnn_graph.h", &[], TABLE, &[], "");
}

/// A GPU that is described to the library.
pub(super) struct Gpu(Raw);

impl Gpu {
    pub(super) fn of_heuristic<'a>(&self, heuristic: Descriptor<'a>) -> Result<Descriptor<'a>, Error> {
        heuristic.descriptors(HEUR_GPU, &[&self.0])
    }

    pub(super) fn of_plan<'a>(&self, plan: Descriptor<'a>) -> Result<Descriptor<'a>, Error> {
        plan.descriptors(PLAN_GPU, &[&self.0])
    }
}

/// What a GPU is: its name, its compute capability, its multiprocessors, MHz of these and of its memory, bits of its memory's bus, MiB of
/// its second cache, KiB of shared memory that a block may have, threads and blocks of a multiprocessor, GB of memory.
struct Properties(&'static str, u32, u32, [u32; 2], u32, u32, u32, [u32; 2], u64);

/// By NVIDIA's data sheets and the table of compute capabilities in the CUDA programming guide.
const T4: Properties = Properties("Tesla T4", 750, 40, [1590, 5001], 256, 4, 64, [1024, 16], 16);
const A100: Properties =
    Properties("NVIDIA A100-SXM4-80GB", 800, 108, [1410, 1593], 5120, 40, 163, [2048, 32], 80);
const H100: Properties =
    Properties("NVIDIA H100 80GB HBM3", 900, 132, [1980, 2619], 5120, 50, 227, [2048, 32], 80);
const H200: Properties = Properties("NVIDIA H200", 900, 132, [1980, 3201], 6144, 60, 227, [2048, 32], 141);
/// Those that have bfloat16.
const GPUS: [Properties; 6] = [
    A100,
    Properties("NVIDIA GeForce RTX 4090", 890, 128, [2520, 10_501], 384, 72, 99, [1536, 24], 24),
    H100,
    H200,
    Properties("NVIDIA B200", 1000, 148, [1965, 3996], 8192, 126, 227, [2048, 32], 180),
    Properties("NVIDIA GeForce RTX 5090", 1200, 170, [2407, 14_001], 512, 96, 99, [1536, 24], 32),
];

impl Properties {
    /// As the library wants to be told.
    fn json(&self) -> String {
        let Properties(name, capability, multiprocessors, mhz, bus, cache, shared, of_one, memory) = self;
        let [threads, blocks] = of_one;
        let [clock, memory_clock] = mhz.map(|mhz| mhz * 1000);
        let members = [
            format!(r#""deviceName": "{name}", "cudaDeviceId": 0, "pciDeviceId": 0"#),
            format!(
                r#""deviceVer": {capability}, "driverVer": 13000, "isTccDriver": 0, "supportCoopLaunch": 1"#
            ),
            format!(r#""multiProcessorCount": {multiprocessors}, "smClockRateKHz": {clock}"#),
            format!(r#""memClockRateKHz": {memory_clock}, "memoryBusWidth": {bus}"#),
            format!(r#""l2CacheSize": {}, "totalGlobalMem": {}"#, cache << 20, memory * 1_000_000_000),
            format!(r#""maxSharedMemoryPerBlockOptin": {}, "maxSharedMemoryPerBlock": 49152"#, shared << 10),
            r#""reservedSharedMemoryPerBlock": 1024, "oversizedSharedMemoryPerBlock": 0"#.to_owned(),
            r#""regsPerBlock": 65536, "maxRegistersPerSM": 65536, "warpSize": 32"#.to_owned(),
            format!(r#""maxThreadsPerBlock": 1024, "maxThreadsPerSM": {threads}, "maxCtasPerSM": {blocks}"#),
            r#""maxBlockSize": [1024, 1024, 64], "maxGridSize": [2147483647, 65535, 65535]"#.to_owned(),
        ];
        format!("{{{}}}", members.join(", "))
    }

    fn described(&self, functions: &Arc<Functions>) -> Target {
        let made = Descriptor::new(functions, &self.0, GPU)
            .and_then(|gpu| gpu.text(GPU_JSON, TYPE_CHAR, &self.json())?.finalize());
        Target::Described(Gpu(made.unwrap_or_else(|error| panic!("{error}"))))
    }
}

/// NVIDIA's own library, or none, said aloud.
fn cudnn() -> Option<Arc<Functions>> {
    static OPENED: OnceLock<Option<Arc<Functions>>> = OnceLock::new();
    let open = || {
        let folders = libraries()?;
        if !driver() {
            return None;
        }
        let functions = Functions::open(&folders).unwrap_or_else(|error| panic!("{error}"));
        assert!(functions.number() >= 91_100, "cuDNN {} is told of no GPUs", functions.number());
        Some(Arc::new(functions))
    };
    OPENED.get_or_init(open).clone()
}

/// What of the driver's library parts of cuDNN are bound to as they are opened. Nothing of it is called.
const OF_DRIVER: [&str; 6] = [
    "cuGetErrorString",
    "cuModuleGetFunction",
    "cuModuleLoadData",
    "cuModuleUnload",
    "cuTensorMapEncodeIm2col",
    "cuTensorMapEncodeTiled",
];

/// Opens the driver's library for good, or, without one, what has its name and functions that fail. `false`, said aloud, without a
/// compiler.
fn driver() -> bool {
    use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};
    let open = |path: &Path| {
        // SAFETY: neither the driver's library nor ours does anything as it is opened.
        unsafe { Library::open(Some(path), RTLD_NOW | RTLD_GLOBAL) }.map(std::mem::forget)
    };
    if open(Path::new("libcuda.so.1")).is_ok() {
        return true;
    }
    let base = std::env::temp_dir().join(format!("phalanx-no-driver-{}", std::process::id()));
    let (source, library) = (base.with_extension("c"), base.with_extension("so"));
    let functions = OF_DRIVER.map(|name| format!("int {name}(void) {{ return 34; }}\n"));
    std::fs::write(&source, functions.concat()).unwrap();
    let mut compiler = Command::new("cc");
    compiler.args(["-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o"]).args([&library, &source]);
    let compiled = compiler.output();
    std::fs::remove_file(&source).unwrap();
    match compiled {
        Err(error) => {
            eprintln!("skipped: no C compiler (package gcc): {error}");
            return false;
        }
        Ok(output) => assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr)),
    }
    open(&library).unwrap_or_else(|error| panic!("{}: {error}", library.display()));
    std::fs::remove_file(&library).unwrap();
    true
}

/// Forward passes with a square kernel, stride and padding.
fn square(images: [usize; 4], outputs: usize, kernel: usize, stride: usize, padding: usize) -> Convolution {
    let plain = Convolution::new(Numbers::F32, images, outputs, [kernel; 2]);
    Convolution { stride: [stride; 2], padding: [padding; 2], ..plain }
}

/// The convolutions of the models: two of MNIST, ResNets 9 and 18 of small images, 18 with a stem for large ones too, as the tutorial
/// has it, ResNet 50 of large images.
fn of_models() -> Vec<Convolution> {
    let mut all = vec![
        square([64, 1, 28, 28], 10, 5, 1, 0),
        square([64, 10, 12, 12], 20, 5, 1, 0),
        square([64, 1, 28, 28], 32, 3, 1, 0),
        square([64, 32, 26, 26], 64, 3, 1, 0),
        square([512, 3, 32, 32], 64, 3, 1, 1),
        square([512, 64, 32, 32], 128, 3, 1, 1),
        square([512, 128, 16, 16], 128, 3, 1, 1),
        square([512, 128, 16, 16], 256, 3, 1, 1),
        square([512, 256, 8, 8], 512, 3, 1, 1),
        square([512, 512, 4, 4], 512, 3, 1, 1),
        square([64, 3, 32, 32], 64, 3, 1, 1),
        square([64, 3, 32, 32], 64, 7, 2, 3),
        square([256, 3, 224, 224], 64, 7, 2, 3),
    ];
    // Stages of blocks: channels inside of a block, and the stride of its first.
    let stages = [(64, 1), (128, 2), (256, 2), (512, 2)];
    for first in [32, 8] {
        let (mut channels, mut size) = (64, first);
        for (inside, stride) in stages {
            all.push(square([64, channels, size, size], inside, 3, stride, 1));
            if stride > 1 {
                all.push(square([64, channels, size, size], inside, 1, stride, 0));
            }
            (channels, size) = (inside, size / stride);
            all.push(square([64, channels, size, size], inside, 3, 1, 1));
        }
    }
    let (mut channels, mut size) = (64, 56);
    for (inside, stride) in stages {
        let outside = 4 * inside;
        all.push(square([256, channels, size, size], inside, 1, 1, 0));
        all.push(square([256, inside, size, size], inside, 3, stride, 1));
        all.push(square([256, channels, size, size], outside, 1, stride, 0));
        (channels, size) = (outside, size / stride);
        all.push(square([256, inside, size, size], outside, 1, 1, 0));
        all.push(square([256, channels, size, size], inside, 1, 1, 0));
        all.push(square([256, inside, size, size], inside, 3, 1, 1));
    }
    all
}

/// Convolutions of all kinds, small: groups, one channel a group, few and odd channels, steps and gaps, single images.
fn of_all_kinds() -> Vec<Convolution> {
    vec![
        Convolution { groups: 3, ..square([2, 6, 9, 9], 9, 3, 1, 0) },
        Convolution { groups: 2, ..square([2, 4, 8, 8], 6, 2, 2, 0) },
        Convolution { groups: 16, ..square([2, 16, 16, 16], 16, 3, 2, 1) },
        Convolution { groups: 4, ..square([8, 64, 14, 14], 128, 3, 1, 1) },
        Convolution { dilation: [2; 2], ..square([2, 8, 16, 16], 8, 3, 1, 2) },
        Convolution {
            dilation: [1, 2],
            stride: [2, 1],
            padding: [1, 2],
            ..square([2, 16, 9, 9], 32, 3, 1, 0)
        },
        square([1, 5, 7, 7], 7, 3, 1, 1),
        square([1, 1, 1, 1], 1, 1, 1, 0),
        square([3, 2, 40, 3], 1, 3, 3, 2),
    ]
}

/// The most memory beside its tensors that a convolution may use here: no more than is allowed on any of the GPUs.
const WORKSPACE_BYTES: usize = 256 << 20;

fn planned(
    functions: &Arc<Functions>,
    gpu: &Target,
    convolution: &Convolution,
    alignment: u32,
    wanted: Wanted,
) -> Result<Vec<Plan>, Error> {
    plans(functions, gpu, convolution, [alignment; 4], WORKSPACE_BYTES, wanted)
}

const NUMBERS: [Numbers; 4] = [Numbers::F32, Numbers::Tf32, Numbers::Bf16, Numbers::F16];

/// All passes of these.
fn passes(of: Vec<Convolution>) -> impl Iterator<Item = Convolution> {
    let all =
        [Pass::Forward, Pass::ForwardBias, Pass::ForwardBiasRelu, Pass::BackwardData, Pass::BackwardFilter];
    of.into_iter().flat_map(move |plain| all.map(|pass| Convolution { pass, ..plain }))
}

#[test]
fn every_convolution_has_a_way_on_every_gpu() {
    let Some(functions) = cudnn() else { return };
    for properties in GPUS.iter().chain([&T4]) {
        let gpu = properties.described(&functions);
        let knows = |numbers: &Numbers| *numbers != Numbers::Bf16 || properties.0 != T4.0;
        for numbers in NUMBERS.into_iter().filter(knows) {
            for plain in passes(of_models()).chain(passes(of_all_kinds())) {
                let convolution = Convolution { numbers, ..plain };
                let found = planned(&functions, &gpu, &convolution, 16, Wanted::First(1));
                let found = found.unwrap_or_else(|error| panic!("{}: {error}", properties.0));
                assert_eq!(found.len(), 1);
            }
        }
    }
}

#[test]
fn tensors_that_begin_anywhere_have_a_way() {
    let Some(functions) = cudnn() else { return };
    let gpu = H100.described(&functions);
    for (numbers, alignment) in
        [(Numbers::F32, 4), (Numbers::Tf32, 8), (Numbers::Bf16, 2), (Numbers::Bf16, 4), (Numbers::F16, 2)]
    {
        for plain in passes(of_all_kinds()) {
            let convolution = Convolution { numbers, ..plain };
            let found = planned(&functions, &gpu, &convolution, alignment, Wanted::First(1));
            found.unwrap_or_else(|error| panic!("aligned to {alignment}: {error}"));
        }
    }
}

#[test]
fn what_a_gpu_has_no_way_for_is_told_from_failures() {
    let Some(functions) = cudnn() else { return };
    let gpu = T4.described(&functions);
    for plain in passes(of_models()) {
        let convolution = Convolution { numbers: Numbers::Bf16, ..plain };
        match planned(&functions, &gpu, &convolution, 16, Wanted::First(1)) {
            Err(error) => assert!(has_no_way(&error), "{error}"),
            Ok(_) => panic!("{}: {convolution}", T4.0),
        }
    }
}

#[test]
fn a_proposal_is_found_again_by_its_number() {
    let Some(functions) = cudnn() else { return };
    let gpu = H200.described(&functions);
    for numbers in NUMBERS {
        for plain in passes(of_models()) {
            let convolution = Convolution { numbers, ..plain };
            let found = planned(&functions, &gpu, &convolution, 16, Wanted::First(8)).unwrap();
            assert!(!found.is_empty() && found.len() <= 8, "{convolution}");
            let last = found.last().unwrap();
            let again = planned(&functions, &gpu, &convolution, 16, Wanted::Only(last.proposal)).unwrap();
            let [again] = &again[..] else { panic!("{convolution}: {}", last.proposal) };
            assert_eq!((again.proposal, again.workspace_bytes), (last.proposal, last.workspace_bytes));
        }
    }
}

#[test]
fn both_layouts_have_a_way() {
    let Some(functions) = cudnn() else { return };
    let gpu = A100.described(&functions);
    for numbers in NUMBERS {
        for plain in passes(of_models()).chain(passes(of_all_kinds())) {
            let convolution = Convolution { numbers, layout: Layout::Nchw, ..plain };
            planned(&functions, &gpu, &convolution, 16, Wanted::First(1))
                .unwrap_or_else(|error| panic!("{error}"));
        }
    }
}
