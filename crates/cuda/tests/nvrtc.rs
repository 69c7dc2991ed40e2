//! Every kernel compiles, without warnings, for every type of elements and the architectures that we have in mind. The compiler
//! is a library that needs no GPU: `pip install nvidia-cuda-nvrtc` brings it, and `PHALANX_TEST_NVRTC` names its folder.

use phalanx_cuda::{Architecture, Element, Error, Form, KERNELS, Nvrtc, Source};
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::process::{Command, Stdio};

const ARCHITECTURES: [Architecture; 2] =
    [Architecture { major: 8, minor: 0 }, Architecture { major: 9, minor: 0 }];

/// The compiler, or none, said aloud.
fn nvrtc() -> Option<Nvrtc> {
    let named: Vec<PathBuf> = std::env::var_os("PHALANX_TEST_NVRTC").map(PathBuf::from).into_iter().collect();
    match Nvrtc::open(&named) {
        Ok(nvrtc) => Some(nvrtc),
        Err(error) => {
            assert!(named.is_empty(), "PHALANX_TEST_NVRTC names {named:?}, but {error}");
            eprintln!("skipped: {error}\nPHALANX_TEST_NVRTC can name the library's folder");
            None
        }
    }
}

/// The kernels that a module has, by its PTX.
fn entries(text: &str) -> BTreeSet<String> {
    let names = text.lines().filter_map(|line| line.trim().strip_prefix(".visible .entry "));
    names.map(|name| name.trim_end_matches('(').to_owned()).collect()
}

/// Whether a kernel reads and writes tensors of the module's type: others of its tensors are float32 in any case.
const BOTH: [bool; 2] = [true, true];
const READS: [bool; 2] = [true, false];
const WRITES: [bool; 2] = [false, true];

type Kernels = (Source, &'static [(&'static str, [bool; 2])]);

/// Those that are as fast as memory is.
const FAST: [Kernels; 11] = [
    (
        Source::Elementwise,
        &[
            ("sum", BOTH),
            ("sum_views", BOTH),
            ("relu", BOTH),
            ("gelu_tanh_gradient", BOTH),
            ("add_assign", BOTH),
            ("sum_in_float", READS),
        ],
    ),
    (Source::Convert, &[("from_f32", WRITES), ("spread_from_bf16", WRITES), ("spread_from_f16", WRITES)]),
    (
        Source::BatchNorm,
        &[
            ("batch_moments", READS),
            ("batch_normalise", BOTH),
            ("batch_whole", BOTH),
            ("batch_sums", READS),
            ("batch_input_gradient", BOTH),
            ("batch_whole_gradient", BOTH),
        ],
    ),
    (Source::Reduce, &[("sum_columns", READS)]),
    (
        Source::LayerNorm,
        &[
            ("layer_norm", BOTH),
            ("layer_norm_gradient", BOTH),
            ("layer_norm_columns", READS),
            ("rounded_layer_norm", WRITES),
            ("rounded_layer_norm_gradient", READS),
            ("rounded_layer_norm_columns", READS),
            ("layer_norm_whole", BOTH),
            ("layer_norm_whole_gradient", BOTH),
            ("rounded_layer_norm_whole", BOTH),
            ("rounded_layer_norm_whole_gradient", BOTH),
        ],
    ),
    (Source::Softmax, &[("softmax", BOTH), ("softmax_gradient", BOTH), ("log_softmax_gradient", BOTH)]),
    (Source::Loss, &[("cross_entropy", READS), ("cross_entropy_gradient", BOTH)]),
    (Source::Optimizer, &[("sgd_momentum", WRITES), ("adamw", WRITES)]),
    (Source::Pooling, &[("average_pool", BOTH), ("average_pool_gradient", BOTH)]),
    (Source::Embedding, &[("embedding", BOTH)]),
    (Source::Gradients, &[("sum_squares", READS), ("find_not_finite", READS)]),
];

/// A module has the kernels of the list and no others.
fn check_names(source: Source, text: &str) {
    let listed = KERNELS.iter().filter(|kernel| kernel.source == source);
    let listed: BTreeSet<String> = listed.map(|kernel| kernel.name.to_owned()).collect();
    assert_eq!(entries(text), listed, "{source:?}");
}

/// Neighbours come in one go: each thread asks for 16 bytes of what the module's type holds at a time.
fn check_fast_kernels(source: Source, element: Element, text: &str) {
    let kind = if element == Element::F32 { "f32" } else { "u32" };
    let of_source = FAST.iter().filter(|(of, _)| *of == source).flat_map(|(_, kernels)| *kernels);
    for (name, [reads, writes]) in of_source {
        let start = text.find(&format!(".entry {name}(")).expect("the module has it");
        let body = &text[start..];
        let body = &body[..body.find("\n}").expect("it ends")];
        for (access, whole, asked) in [("ld", kind, reads), ("st", "b32", writes)] {
            let whole = format!("{access}.global.v4.{whole}");
            assert!(!asked || body.contains(&whole), "{name} for {element:?} has no {whole}");
            // Values, gradients and states are float32 in each module.
            let floats = source != Source::Optimizer || body.contains("ld.global.v4.f32");
            assert!(floats, "{name} for {element:?} takes its floats one by one");
            let piece = format!("{access}.global.v4.u16");
            assert!(!body.contains(&piece), "{name} for {element:?} has {piece}, of 8 bytes");
        }
    }
}

/// Those that all kernels are compiled for: `PHALANX_TEST_ARCHITECTURES` can name others, as `75,89,120`.
fn architectures() -> Vec<Architecture> {
    let of = |name: &str| {
        let number: u32 =
            name.parse().expect("PHALANX_TEST_ARCHITECTURES: numbers with commas between would do");
        Architecture { major: number / 10, minor: number % 10 }
    };
    match std::env::var("PHALANX_TEST_ARCHITECTURES") {
        Ok(named) => named.split(',').map(of).collect(),
        Err(_) => ARCHITECTURES.to_vec(),
    }
}

/// Which of the architectures this process is to compile for.
const ONE: &str = "PHALANX_TEST_ONE_ARCHITECTURE";

#[test]
fn every_kernel_compiles_for_every_type_and_architecture_and_asks_for_neighbours_in_one_go() {
    let Some(nvrtc) = nvrtc() else { return };
    if let Ok(one) = std::env::var(ONE) {
        let architecture = architectures()[one.parse::<usize>().unwrap()];
        // Attention in 16 bits is made of what came with bfloat16, and not taken where that isn't.
        let is_taken = |source: &Source| *source != Source::AttentionHalves || architecture.has_bfloat16();
        for source in Source::ALL.into_iter().filter(is_taken) {
            for &element in source.elements() {
                let both = nvrtc.module_and_text(source, element, architecture);
                let (cubin, text) = both.unwrap_or_else(|error| panic!("{error}"));
                assert!(cubin.starts_with(b"\x7fELF"), "{source:?}: no machine code");
                let text = String::from_utf8_lossy(&text);
                check_names(source, &text);
                check_fast_kernels(source, element, &text);
            }
        }
        return;
    }
    // The compiler works for one thread of a process at a time, and takes a minute for each.
    let compile = |one: usize| {
        let mut command = Command::new(std::env::current_exe().unwrap());
        let test = "every_kernel_compiles_for_every_type_and_architecture_and_asks_for_neighbours_in_one_go";
        command.args(["--exact", test, "--nocapture"]);
        command.env(ONE, one.to_string()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let all: Vec<_> = (0..architectures().len()).map(compile).collect();
    for (child, architecture) in all.into_iter().zip(architectures()) {
        let out = child.wait_with_output().unwrap();
        let said = String::from_utf8_lossy(&out.stdout);
        // That one test has run, too.
        let is_right = out.status.success() && said.contains("1 passed");
        assert!(is_right, "for sm_{architecture}: {said}{}", String::from_utf8_lossy(&out.stderr));
    }
}

/// What this project's kernels ask for; text for the oldest is what a GPU takes that the compiler doesn't know.
#[test]
fn the_oldest_architecture_that_is_known_compiles_too() {
    let Some(nvrtc) = nvrtc() else { return };
    let oldest = *nvrtc.known().iter().min().expect("a compiler knows some");
    for (source, element) in [(Source::Elementwise, Element::Bf16), (Source::Attention, Element::F16)] {
        nvrtc.module(source, element, oldest, Form::Ptx).unwrap_or_else(|error| panic!("{error}"));
    }
}

#[test]
fn errors_and_warnings_come_with_what_the_compiler_says() {
    let Some(nvrtc) = nvrtc() else { return };
    let compiled = |text| nvrtc.compile("trial.cu", text, Element::F32, ARCHITECTURES[0], Form::Cubin);
    assert!(compiled("extern \"C\" __global__ void none() {}").is_ok());
    for (text, want) in [
        ("extern \"C\" __global__ void broken() { missing(); }", "missing"),
        ("extern \"C\" __global__ void unused() { int never = 0; }", "never"),
    ] {
        let Err(Error::Compile { log, architecture, .. }) = compiled(text) else { panic!("{text} compiles") };
        assert!(log.contains(want) && architecture == "sm_80", "{log}");
    }
}

#[test]
fn an_architecture_that_the_compiler_does_not_know_is_an_error() {
    let Some(nvrtc) = nvrtc() else { return };
    let unknown = Architecture { major: 1, minor: 2 };
    let error = nvrtc.module(Source::Reduce, Element::F32, unknown, Form::Cubin).unwrap_err();
    assert!(error.to_string().contains("sm_12"), "{error}");
}
