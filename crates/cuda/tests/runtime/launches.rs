//! Launches give what the engine gives on a CPU.

use crate::rig::{affine, bytes, fake, floats, gpu, launch, numbers, step_of};
use phalanx_cuda::{Argument, DeviceMemory, Element, Gpu, Source, Walk, Work, kernel};
use phalanx_nn::optim::{Optimizer, Sgd};
use phalanx_tensor::{Device, Tensor};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Memory with these bytes.
fn filled(gpu: &Gpu, with: &[u8]) -> DeviceMemory {
    let memory = gpu.alloc(gpu.compute(), with.len()).unwrap();
    gpu.compute().write(with, &memory, 0).unwrap();
    memory
}

fn held(gpu: &Gpu, memory: &DeviceMemory) -> Vec<f32> {
    floats(&gpu.compute().read(memory, 0..memory.bytes()).unwrap())
}

#[test]
fn a_gpu_tells_what_it_is() {
    let Some(fake) = fake() else { return };
    let gpu = gpu(&fake);
    assert_eq!((gpu.index(), gpu.name(), gpu.multiprocessors()), (0, "Fake GPU", 132));
    assert_eq!(gpu.architecture().to_string(), "90");
    let before = gpu.memory().unwrap();
    let _held = gpu.alloc(gpu.compute(), 1 << 20).unwrap();
    assert_eq!(gpu.memory().unwrap().free, before.free - (1 << 20));
}

#[test]
fn elements_and_rows_are_those_of_the_engine() {
    let Some(fake) = fake() else { return };
    let gpu = gpu(&fake);
    let [rows, width] = [37, 130];
    let n = rows * width;
    let x = numbers(n, 1);
    let tensor = Tensor::from_slice(&Device::cpu(1), &x, [rows, width]);
    let (from, to) = (filled(&gpu, bytes(&x)), gpu.alloc(gpu.compute(), 4 * n).unwrap());
    let numbers = [Argument::Int(n as i64), Argument::Float(0.0), Argument::Float(0.0)];
    let memory = [Argument::Read(from.address()), Argument::Write(to.address())];
    let relu = [&memory[..], &numbers].concat();
    launch(&gpu, gpu.compute(), "relu", Element::F32, Work::Elements(n as u64), &relu).unwrap();
    assert_eq!(held(&gpu, &to), tensor.relu().to_vec::<f32>());
    let softmax = [&memory[..], &[Argument::Int(rows as i64), Argument::Int(width as i64)]].concat();
    let work = Work::Rows { rows: rows as u64, width: width as u64 };
    launch(&gpu, gpu.compute(), "softmax", Element::F32, work, &softmax).unwrap();
    let want: Vec<f32> = tensor.softmax(1).to_vec();
    for (got, want) in held(&gpu, &to).iter().zip(&want) {
        // A few roundings of a share of one.
        assert!((got - want).abs() <= 1e-6, "{got}, not {want}");
    }
    // A view: the table on its side, by way of a struct.
    let walk = Walk::new(&[width, rows], [&[1, width], &[rows, 1]]);
    let copy = [&memory[..], &[Argument::Struct(walk.as_bytes()), Argument::Int(n as i64)]].concat();
    // The type of elements doesn't matter to a copy of bits.
    launch(&gpu, gpu.compute(), "copy_4", Element::Bf16, Work::Elements(n as u64), &copy).unwrap();
    let turned: Vec<f32> = (0..n).map(|i| x[i % rows * width + i / rows]).collect();
    assert_eq!(held(&gpu, &to), turned);
    assert!(fake.damage().is_empty(), "{:?}", fake.damage());
}

#[test]
fn types_of_elements_have_modules_of_their_own() {
    let Some(fake) = fake() else { return };
    let gpu = gpu(&fake);
    let x = numbers(500, 2);
    let from = filled(&gpu, bytes(&x));
    for (element, want) in [
        (Element::Bf16, x.iter().flat_map(|&x| half::bf16::from_f32(x).to_ne_bytes()).collect::<Vec<u8>>()),
        (Element::F16, x.iter().flat_map(|&x| half::f16::from_f32(x).to_ne_bytes()).collect()),
    ] {
        let to = gpu.alloc(gpu.compute(), 1000).unwrap();
        let arguments =
            [Argument::Read(from.address()), Argument::Write(to.address()), Argument::Int(x.len() as i64)];
        launch(&gpu, gpu.compute(), "from_f32", element, Work::Elements(x.len() as u64), &arguments).unwrap();
        assert_eq!(gpu.compute().read(&to, 0..1000).unwrap(), want, "{element:?}");
    }
    assert_eq!(fake.compilations(), 2);
}

#[test]
fn a_step_of_sgd_is_the_engines_bit_by_bit() {
    let Some(fake) = fake() else { return };
    let gpu = gpu(&fake);
    let n = 1999;
    let mut values = numbers(n, 3);
    let on_gpu = filled(&gpu, bytes(&values));
    let mut optimizer = Optimizer::new(Sgd { weight_decay: 0.01, ..Sgd::new(0.1) }).unwrap();
    for step in 0..3 {
        let grads = numbers(n, 10 + step);
        let grads_on_gpu = filled(&gpu, bytes(&grads));
        let settings = filled(&gpu, &step_of(n, [1.0, 0.1, 0.01, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0]));
        let arguments = [
            Argument::Write(on_gpu.address()),
            Argument::Read(grads_on_gpu.address()),
            Argument::Null,
            Argument::Read(settings.address()),
            Argument::Null,
            Argument::Double(0.0),
            Argument::Null,
            Argument::Null,
            Argument::Int(n as i64),
        ];
        launch(&gpu, gpu.compute(), "sgd", Element::F32, Work::Elements(n as u64), &arguments).unwrap();
        optimizer.step(&mut values, &grads, 1.0);
        assert!(held(&gpu, &on_gpu) == values, "step {step}");
    }
}

#[test]
fn a_launch_is_one_call_once_its_kernel_is_loaded() {
    let Some(fake) = fake() else { return };
    let gpu = gpu(&fake);
    let memory = gpu.alloc(gpu.compute(), 400).unwrap();
    let called = || {
        let before = fake.log().len();
        affine(&gpu, gpu.compute(), &memory, &memory, 1.0, 1.0).unwrap();
        fake.log().split_off(before)
    };
    let launched = ["cuLaunchKernel", "launch affine"];
    let first = called();
    assert!(
        first.contains(&"cuModuleLoadData".to_owned()) && first.ends_with(&launched.map(str::to_owned)),
        "{first:?}"
    );
    assert_eq!(called(), launched);
    gpu.prepare(Source::Elementwise, Element::F32).unwrap();
    assert_eq!((fake.calls("cuModuleLoadData"), fake.calls("cuModuleGetFunction")), (1, 1));
}

#[test]
fn nothing_to_do_is_not_launched() {
    let Some(fake) = fake() else { return };
    let gpu = gpu(&fake);
    let empty = gpu.alloc(gpu.compute(), 0).unwrap();
    let arguments = [
        Argument::Read(empty.address()),
        Argument::Write(empty.address()),
        Argument::Int(0),
        Argument::Float(0.0),
        Argument::Float(0.0),
    ];
    launch(&gpu, gpu.compute(), "relu", Element::F32, Work::Elements(0), &arguments).unwrap();
    assert_eq!(fake.calls("cuLaunchKernel") + fake.calls("cuMemAlloc_v2") + fake.compilations(), 0);
}

#[test]
fn what_a_kernel_does_not_take_is_a_bug_and_not_launched() {
    let Some(fake) = fake() else { return };
    let gpu = gpu(&fake);
    let tried = |arguments: &[Argument<'_>], work| {
        let panicked = catch_unwind(AssertUnwindSafe(|| {
            launch(&gpu, gpu.compute(), "relu", Element::F32, work, arguments)
        }));
        let words = panicked.expect_err("a panic");
        words.downcast_ref::<String>().cloned().expect("words")
    };
    assert_eq!(kernel("relu").parameters.len(), 5);
    let words = tried(&[Argument::Int(1)], Work::Elements(1));
    assert_eq!(words, "relu: 1 arguments for 5 parameters");
    let words = tried(&[Argument::Int(1); 5], Work::Elements(1));
    assert_eq!(words, "relu: argument 0 is Int(1), but the kernel takes Read");
    assert_eq!(fake.calls("cuLaunchKernel"), 0);
}
