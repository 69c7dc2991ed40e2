//! Convolutions against plain loops.

use crate::numbers::{Memory, Type, near};
use crate::stream::{TestStream, fake};
use phalanx_cuda::cudnn::{Convolution, Convolutions, Cudnn, Layout, Numbers, Operands, Pass};
use phalanx_cuda::{Address, Error, Proposals};
use phalanx_fake_cuda::FakeCuda;
use std::time::Duration;

const WORKSPACE: usize = 1 << 16;
const TYPES: [Numbers; 4] = [Numbers::F32, Numbers::Tf32, Numbers::Bf16, Numbers::F16];
const PASSES: [Pass; 5] =
    [Pass::Forward, Pass::ForwardBias, Pass::ForwardBiasRelu, Pass::BackwardData, Pass::BackwardFilter];

fn stand_in() -> Option<(FakeCuda, Convolutions)> {
    let fake = fake()?;
    let convolutions = Cudnn::open(&[fake.folder().to_owned()]).unwrap().convolutions(WORKSPACE).unwrap();
    Some((fake, convolutions))
}

fn type_of(numbers: Numbers) -> Type {
    match numbers {
        Numbers::F32 | Numbers::Tf32 => Type::F32,
        Numbers::Bf16 => Type::Bf16,
        Numbers::F16 => Type::F16,
    }
}

/// Where the element (n, c, h, w) of something of these sizes lies.
fn at(layout: Layout, [_, cs, hs, ws]: [usize; 4], [n, c, h, w]: [usize; 4]) -> usize {
    match layout {
        Layout::Nhwc => ((n * hs + h) * ws + w) * cs + c,
        Layout::Nchw => ((n * cs + c) * hs + h) * ws + w,
    }
}

/// Sizes of images, kernels and outputs.
fn sizes(p: &Convolution) -> [[usize; 4]; 3] {
    let ([n, c, _, _], [kh, kw], [oh, ow]) = (p.images, p.kernel, p.output());
    [p.images, [p.outputs, c / p.groups, kh, kw], [n, p.outputs, oh, ow]]
}

/// Calls `f(image, kernel, output)` with the places of every product that a convolution sums.
fn products(p: &Convolution, mut f: impl FnMut(usize, usize, usize)) {
    let [images, kernels, outputs] = sizes(p);
    let [o_count, i_count, kh, kw] = kernels;
    let [n_count, _, oh, ow] = outputs;
    let pixels = |h: usize, w: usize| (0..h).flat_map(move |y| (0..w).map(move |x| (y, x)));
    for (n, o) in pixels(n_count, o_count) {
        for (y, x) in pixels(oh, ow) {
            for i in 0..i_count {
                for (ky, kx) in pixels(kh, kw) {
                    let row = (y * p.stride[0] + ky * p.dilation[0]).checked_sub(p.padding[0]);
                    let column = (x * p.stride[1] + kx * p.dilation[1]).checked_sub(p.padding[1]);
                    let (Some(row), Some(column)) = (row, column) else { continue };
                    if row < images[2] && column < images[3] {
                        let channel = o / (o_count / p.groups) * i_count + i;
                        f(
                            at(p.layout, images, [n, channel, row, column]),
                            at(p.layout, kernels, [o, i, ky, kx]),
                            at(p.layout, outputs, [n, o, y, x]),
                        );
                    }
                }
            }
        }
    }
}

/// Runs a convolution and compares what it writes; all else must stay.
#[track_caller]
fn check(fake: &FakeCuda, convolutions: &mut Convolutions, p: Convolution) {
    let of = type_of(p.numbers);
    let stream = TestStream::on(fake, 0);
    let counts = sizes(&p).map(|sizes| sizes.iter().product::<usize>());
    let mut memory = [0, 1, 2].map(|i| Memory::random(of, counts[i], i as u64));
    let mut bias = Memory::random(of, p.outputs, 9);
    let before = memory.each_mut().map(Memory::numbers);
    let has_bias = matches!(p.pass, Pass::ForwardBias | Pass::ForwardBiasRelu);
    let [images, kernels, outputs] = memory.each_mut().map(Memory::at);
    let operands =
        Operands { images, kernels, outputs, bias: if has_bias { bias.at() } else { Address::NULL } };
    let mut workspace = Memory::bytes(of, convolutions.workspace_bytes(&p, &operands).unwrap());
    // SAFETY: all memory lives until the stream is awaited.
    unsafe { convolutions.run(&p, &operands, workspace.at(), stream.handle()) }.unwrap();
    stream.synchronize();
    memory.iter_mut().chain([&mut bias, &mut workspace]).for_each(Memory::check_guards);

    let [x, w, y] = &before;
    let written = match p.pass {
        Pass::Forward | Pass::ForwardBias | Pass::ForwardBiasRelu => 2,
        Pass::BackwardData => 0,
        Pass::BackwardFilter => 1,
    };
    let mut want = vec![0.0; counts[written]];
    let mut terms = vec![0_usize; counts[written]];
    products(&p, |i, k, o| {
        let (to, product) = [(i, w[k] * y[o]), (k, x[i] * y[o]), (o, x[i] * w[k])][written];
        want[to] += product;
        terms[to] += 1;
    });
    if has_bias {
        let (bias, sizes) = (bias.numbers(), sizes(&p)[2]);
        for (n, c, h, w) in (0..sizes[0])
            .flat_map(|n| (0..sizes[1]).map(move |c| (n, c)))
            .flat_map(|(n, c)| (0..sizes[2]).map(move |h| (n, c, h)))
            .flat_map(|(n, c, h)| (0..sizes[3]).map(move |w| (n, c, h, w)))
        {
            want[at(p.layout, sizes, [n, c, h, w])] += bias[c];
        }
    }
    if p.pass == Pass::ForwardBiasRelu {
        want.iter_mut().for_each(|x| *x = x.max(0.0));
    }
    // TF32 rounds each factor to 10 bits of fraction.
    let scale = *terms.iter().max().unwrap() as f64 * if p.numbers == Numbers::Tf32 { 300.0 } else { 1.0 };
    for (i, memory) in memory.iter_mut().enumerate() {
        match i == written {
            true => near(&p.to_string(), of, &memory.numbers(), &want, scale + 1.0),
            false => assert_eq!(memory.numbers(), before[i], "{p}: something that is read was written"),
        }
    }
}

/// Convolutions as they come: everyday ones, and the edges.
fn shapes() -> Vec<Convolution> {
    let plain = Convolution::new(Numbers::F32, [2, 8, 6, 5], 16, [3, 3]);
    let one = Convolution::new(Numbers::F32, [1, 1, 1, 1], 1, [1, 1]);
    vec![
        plain,
        one,
        Convolution { padding: [1, 1], ..plain },
        Convolution { padding: [1, 1], stride: [2, 2], ..plain },
        Convolution { kernel: [1, 1], stride: [2, 2], ..plain },
        Convolution { kernel: [2, 3], padding: [0, 2], stride: [3, 1], ..plain },
        Convolution { dilation: [2, 1], padding: [2, 1], ..plain },
        Convolution { dilation: [2, 2], ..plain },
        Convolution { groups: 2, padding: [1, 1], ..plain },
        Convolution { groups: 8, ..plain },
        Convolution { groups: 4, stride: [2, 1], dilation: [1, 2], padding: [1, 2], ..plain },
        Convolution {
            images: [3, 3, 9, 9],
            outputs: 5,
            kernel: [7, 7],
            stride: [2, 2],
            padding: [3, 3],
            ..plain
        },
        Convolution { images: [1, 4, 3, 3], kernel: [3, 3], ..plain },
    ]
}

#[test]
fn convolutions_of_all_passes_types_layouts_and_shapes_are_right() {
    let Some((fake, mut convolutions)) = stand_in() else { return };
    for shape in shapes() {
        for (pass, numbers) in PASSES.into_iter().flat_map(|pass| TYPES.map(|numbers| (pass, numbers))) {
            for layout in [Layout::Nhwc, Layout::Nchw] {
                check(&fake, &mut convolutions, Convolution { pass, numbers, layout, ..shape });
            }
        }
    }
}

/// A small convolution with all of its memory.
struct Small {
    convolution: Convolution,
    memory: [Memory; 4],
    stream: TestStream,
}

impl Small {
    fn new(fake: &FakeCuda, numbers: Numbers) -> Small {
        let of = type_of(numbers);
        let memory = [16, 8, 32].map(|n| Memory::random(of, n, 1));
        let [images, kernels, outputs] = memory;
        let memory = [images, kernels, outputs, Memory::bytes(of, WORKSPACE)];
        let convolution = Convolution::new(numbers, [1, 2, 2, 4], 4, [1, 1]);
        Small { convolution, memory, stream: TestStream::on(fake, 0) }
    }

    fn operands(&mut self) -> Operands {
        let [images, kernels, outputs, _] = self.memory.each_mut().map(Memory::at);
        Operands { images, kernels, outputs, bias: Address::NULL }
    }

    fn run(&mut self, convolutions: &mut Convolutions) -> Result<(), Error> {
        let (operands, workspace) = (self.operands(), self.memory[3].at());
        // SAFETY: the memory lives until the stream has done its work.
        unsafe { convolutions.run(&self.convolution, &operands, workspace, self.stream.handle()) }
    }
}

fn engines(fake: &FakeCuda) -> Vec<String> {
    let executed = fake
        .cudnn()
        .log()
        .into_iter()
        .filter_map(|line| line.strip_prefix("cudnnBackendExecute engine=").map(str::to_owned));
    executed.collect()
}

#[test]
fn engines_are_taken_that_may_be_and_only_once() {
    let Some((fake, mut convolutions)) = stand_in() else { return };
    // In the order of the heuristic: one that fails, one of chance, one of tensor cores, one that converts, a plain one.
    for (numbers, want, bytes) in
        [(Numbers::F32, "4", 512), (Numbers::Tf32, "2", 2048), (Numbers::Bf16, "2", 2048)]
    {
        let mut small = Small::new(&fake, numbers);
        (0..3).for_each(|_| small.run(&mut convolutions).unwrap());
        small.stream.synchronize();
        let operands = small.operands();
        assert_eq!(convolutions.workspace_bytes(&small.convolution, &operands).unwrap(), bytes);
        assert_eq!(engines(&fake).split_off(engines(&fake).len() - 3), [want; 3], "{numbers:?}");
    }
    assert_eq!(convolutions.planned(), 3);
    let heuristics = fake.cudnn().log().iter().filter(|line| *line == "cudnnBackendFinalize 4").count();
    assert_eq!(heuristics, 3);
}

#[test]
fn where_workspaces_must_be_small_another_engine_is_taken() {
    let Some((fake, convolutions)) = stand_in() else { return };
    drop(convolutions);
    let mut small = Small::new(&fake, Numbers::F32);
    for (bytes, engine) in [(511, "6"), (15, "5")] {
        let mut convolutions = Cudnn::open(&[fake.folder().to_owned()]).unwrap().convolutions(bytes).unwrap();
        small.run(&mut convolutions).unwrap();
        small.stream.synchronize();
        assert_eq!(engines(&fake).last().unwrap(), engine);
    }
}

#[test]
fn a_search_keeps_the_fastest() {
    let Some((fake, mut convolutions)) = stand_in() else { return };
    let mut small = Small::new(&fake, Numbers::Bf16);
    let (operands, workspace, stream) = (small.operands(), small.memory[3].at(), small.stream.handle());
    let mut times = [30, 10, 20].map(Duration::from_micros).into_iter();
    let mut clock = |run: &mut dyn FnMut() -> Result<(), Error>| {
        run()?;
        Ok(times.next().unwrap())
    };
    // SAFETY: the memory lives until the stream is awaited.
    let chosen =
        unsafe { convolutions.search(&small.convolution, &operands, &mut |_| workspace, stream, &mut clock) };
    // Of five proposals the first can't be and the second is none of those that may be taken.
    let chosen = chosen.unwrap();
    assert_eq!((chosen.proposal, chosen.measured, chosen.best), (3, 3, Duration::from_micros(10)));
    small.run(&mut convolutions).unwrap();
    small.stream.synchronize();
    assert_eq!(engines(&fake), ["2", "3", "4", "3"]);
    let others = || Cudnn::open(&[fake.folder().to_owned()]).unwrap().convolutions(1 << 20).unwrap();
    for (proposal, engine, is_there) in [
        (4, 4, true),
        (257, 6, true),
        (128, 5, true),
        (1, 1, false),
        (0, 0, false),
        (5, 5, false),
        (77, 77, false),
    ] {
        let mut convolutions = others();
        assert_eq!(
            convolutions.take(&small.convolution, &operands, proposal).unwrap(),
            is_there,
            "{proposal}"
        );
        assert_eq!(convolutions.is_chosen(&small.convolution, &operands), is_there);
        if is_there {
            small.run(&mut convolutions).unwrap();
            small.stream.synchronize();
            assert_eq!(engines(&fake).last().unwrap(), &engine.to_string());
        }
    }
}

#[test]
fn each_failure_names_call_status_and_sizes_and_leaves_nothing() {
    let Some((fake, mut convolutions)) = stand_in() else { return };
    let rows = [
        ("cudnnBackendCreateDescriptor", 4003, "HOST_ALLOCATION_FAILED"),
        ("cudnnBackendSetAttribute", 2000, "CUDNN_STATUS_BAD_PARAM"),
        ("cudnnBackendFinalize", 3001, "CUDNN_STATUS_NOT_SUPPORTED_GRAPH_PATTERN"),
        ("cudnnBackendExecute", 5000, "CUDNN_STATUS_EXECUTION_FAILED"),
        ("cudnnSetStream", 2000, "CUDNN_STATUS_BAD_PARAM"),
    ];
    let mut small = Small::new(&fake, Numbers::F32);
    for (call, code, status) in rows {
        fake.cudnn().fail(call, 1, code);
        let words = small.run(&mut convolutions).unwrap_err().to_string();
        let parts = ["cuDNN", call, status, "images [1, 2, 2, 4]", "4 kernels of 1 x 1 in F32 Nhwc", "hint:"];
        assert!(parts.iter().all(|part| words.contains(part)), "{parts:?} aren't all in: {words}");
    }
    drop(convolutions);
    assert_eq!(fake.cudnn().live(), 0);
    fake.cudnn().fail("cudnnCreate", 1, 1001);
    let words = Cudnn::open(&[fake.folder().to_owned()]).unwrap().convolutions(0).unwrap_err().to_string();
    assert!(words.contains("CUDNN_STATUS_NOT_INITIALIZED") && words.contains("nvidia-smi"), "{words}");
}

#[test]
fn sizes_that_do_not_fit_are_bugs() {
    let Some((_fake, mut convolutions)) = stand_in() else { return };
    let plain = Convolution::new(Numbers::F32, [1, 4, 5, 5], 4, [3, 3]);
    let wrong = [
        Convolution { images: [1, 4, 2, 5], ..plain },
        Convolution { groups: 3, ..plain },
        Convolution { groups: 0, ..plain },
        Convolution { stride: [0, 1], ..plain },
        Convolution { images: [0, 4, 5, 5], ..plain },
        Convolution { pass: Pass::ForwardBias, ..plain },
    ];
    let at = Address(256);
    let operands = Operands { images: at, kernels: at, outputs: at, bias: Address::NULL };
    for convolution in wrong {
        let planned = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            convolutions.workspace_bytes(&convolution, &operands)
        }));
        assert!(planned.is_err(), "{convolution:?}");
    }
}

#[test]
fn nothing_is_left_of_ten_thousand_calls() {
    let Some((fake, mut convolutions)) = stand_in() else { return };
    let mut small = Small::new(&fake, Numbers::F32);
    small.run(&mut convolutions).unwrap();
    let lives = fake.cudnn().live();
    (1..10_000).for_each(|_| small.run(&mut convolutions).unwrap());
    small.stream.synchronize();
    assert_eq!(fake.cudnn().live(), lives);
    drop(convolutions);
    assert_eq!(fake.cudnn().live(), 0);
    let made = fake.cudnn().calls("cudnnBackendCreateDescriptor");
    assert_eq!(
        (made, fake.cudnn().calls("cudnnBackendExecute")),
        (fake.cudnn().calls("cudnnBackendDestroyDescriptor"), 10_000)
    );
}
