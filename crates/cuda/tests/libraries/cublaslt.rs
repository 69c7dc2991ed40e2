//! Products against plain loops.

use crate::numbers::{Memory, Type, near};
use crate::stream::{TestStream, fake};
use phalanx_cuda::cublaslt::{
    CublasLt, Epilogue, Kept, Numbers, Operand, Operands, Order, Product, Products, Vector,
};
use phalanx_cuda::{Address, Choices, Chosen, Error, Proposals};
use phalanx_fake_cuda::FakeCuda;
use std::time::Duration;

const WORKSPACE: usize = 1 << 20;

fn stand_in() -> Option<(FakeCuda, Products)> {
    let fake = fake()?;
    let products = CublasLt::open(&[fake.folder().to_owned()]).unwrap().products(WORKSPACE).unwrap();
    Some((fake, products))
}

fn type_of(numbers: Numbers) -> Type {
    match numbers {
        Numbers::F32 | Numbers::Tf32 => Type::F32,
        Numbers::F64 => Type::F64,
        Numbers::Bf16 => Type::Bf16,
        Numbers::F16 => Type::F16,
    }
}

/// GELU by the hyperbolic tangent.
fn gelu(x: f64) -> f64 {
    0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x.powi(3))).tanh())
}

/// The slope of it: with t as the tangent, (1 + t) / 2 + x / 2 t'.
fn gelu_slope(x: f64) -> f64 {
    let root = (2.0 / std::f64::consts::PI).sqrt();
    let t = (root * (x + 0.044_715 * x.powi(3))).tanh();
    0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * root * (1.0 + 3.0 * 0.044_715 * x * x)
}

fn at(operand: Operand, batch: usize, i: usize, j: usize) -> usize {
    batch * operand.stride
        + match operand.order {
            Order::Rows => i * operand.leading + j,
            Order::Columns => j * operand.leading + i,
        }
}

/// Elements that a factor spans.
fn span(operand: Operand, batch: usize, [rows, columns]: [usize; 2]) -> usize {
    at(operand, batch - 1, rows - 1, columns - 1) + 1
}

/// The product before its epilogue, as rows without gaps.
fn reference(p: &Product, a: &[f64], b: &[f64], before: &[f64], alpha: f64, beta: f64) -> Vec<f64> {
    let mut out = Vec::new();
    for (batch, i, j) in
        (0..p.batch).flat_map(|batch| (0..p.m).flat_map(move |i| (0..p.n).map(move |j| (batch, i, j))))
    {
        let sum: f64 = (0..p.k).map(|l| a[at(p.a, batch, i, l)] * b[at(p.b, batch, l, j)]).sum();
        out.push(alpha * sum + beta * before[batch * p.out_stride + i * p.out_leading + j]);
    }
    out
}

struct Row {
    product: Product,
    alpha: f64,
    beta: f64,
}

/// Runs a product and compares everything that it writes.
#[track_caller]
fn check(fake: &FakeCuda, products: &mut Products, Row { product: p, alpha, beta }: Row) {
    let of = type_of(p.numbers);
    let stream = TestStream::on(fake, 0);
    let out_span = (p.batch - 1) * p.out_stride + (p.m - 1) * p.out_leading + p.n;
    let mut a = Memory::random(of, span(p.a, p.batch, [p.m, p.k]), 1);
    let mut b = Memory::random(of, span(p.b, p.batch, [p.k, p.n]), 2);
    let mut out = Memory::random(of, out_span, 3);
    let n_vector = match p.epilogue.vector() {
        Vector::None => 0,
        Vector::PerColumn => p.n,
        Vector::PerRow => p.m,
    };
    let mut vector = Memory::random(of, n_vector, 4);
    let mut workspace = Memory::bytes(of, WORKSPACE);
    // A gradient's mask or input comes of a product forward: of the matrix that will be multiplied by it.
    let mut kept = Memory::bytes(of, p.kept_bytes());
    let is_gradient = matches!(
        p.epilogue,
        Epilogue::ReluGradient
            | Epilogue::ReluGradientBias
            | Epilogue::GeluGradient
            | Epilogue::GeluGradientBias
    );
    let mut input = vec![];
    if is_gradient {
        let epilogue = match p.epilogue.kept() {
            Kept::Mask => Epilogue::ReluKept,
            _ => Epilogue::GeluKept,
        };
        let forward = Product { epilogue, ..Product::new(p.numbers, [p.m, p.n, 1]) };
        let (mut x, mut y) = (Memory::random(of, p.m, 5), Memory::random(of, p.n, 6));
        input = reference(&forward, &x.numbers(), &y.numbers(), &vec![0.0; p.m * p.n], 1.0, 0.0);
        let mut scratch = Memory::room(of, p.m * p.n);
        let operands = Operands { kept: kept.at(), ..Operands::new(x.at(), y.at(), scratch.at()) };
        // SAFETY: all memory lives until the stream is awaited.
        unsafe { products.run(&forward, &operands, workspace.at(), stream.handle()) }.unwrap();
        stream.synchronize();
    }

    let (va, vb, before, bias) = (a.numbers(), b.numbers(), out.numbers(), vector.numbers());
    let (a_at, b_at, out_at) = (a.at(), b.at(), out.at());
    let operands =
        Operands { vector: vector.at(), kept: kept.at(), alpha, beta, ..Operands::new(a_at, b_at, out_at) };
    // SAFETY: all memory lives until the stream is awaited.
    unsafe { products.run(&p, &operands, workspace.at(), stream.handle()) }.unwrap();
    stream.synchronize();
    for memory in [&mut a, &mut b, &mut out, &mut vector, &mut workspace, &mut kept] {
        memory.check_guards();
    }
    assert!(a.numbers() == va && b.numbers() == vb, "{p}: a factor was written");

    let mut want = reference(&p, &va, &vb, &before, alpha, beta);
    let column = |i: usize| i % p.n;
    for (i, x) in want.iter_mut().enumerate() {
        use Epilogue::*;
        if matches!(p.epilogue, Bias | BiasRelu | BiasReluKept | BiasGelu | BiasGeluKept) {
            *x += bias[column(i)];
        }
        *x = match p.epilogue {
            Relu | BiasRelu | ReluKept | BiasReluKept => x.max(0.0),
            Gelu | BiasGelu | GeluKept | BiasGeluKept => gelu(*x),
            ReluGradient | ReluGradientBias if input[i] > 0.0 => *x,
            ReluGradient | ReluGradientBias => 0.0,
            GeluGradient | GeluGradientBias => *x * gelu_slope(input[i]),
            None | Bias | SumsOfA | SumsOfB => *x,
        };
    }
    // TF32 rounds each factor to 10 bits of fraction.
    let scale = p.k as f64 * if p.numbers == Numbers::Tf32 { 300.0 } else { 1.0 };
    // What GELU kept for its gradient is rounded.
    let scale = if p.epilogue.kept() == Kept::Matrix {
        scale * (of.tolerance() / Type::F32.tolerance()).max(1.0)
    } else {
        scale
    };
    let got = out.numbers();
    let mut result = vec![];
    for (at, x) in got.iter().enumerate() {
        let (batch, at_in) = match p.out_stride {
            0 => (0, at),
            stride => (at / stride, at % stride),
        };
        let (i, j) = (at_in / p.out_leading, at_in % p.out_leading);
        match i < p.m && j < p.n && batch < p.batch {
            true => result.push(*x),
            false => assert_eq!(*x, before[at], "{p}: written between its rows"),
        }
    }
    near(&p.to_string(), of, &result, &want, scale);
    let sums = match p.epilogue {
        Epilogue::ReluGradientBias | Epilogue::GeluGradientBias => {
            (0..p.n).map(|j| (0..p.m).map(|i| want[i * p.n + j]).sum()).collect()
        }
        Epilogue::SumsOfA => (0..p.m).map(|i| (0..p.k).map(|l| va[at(p.a, 0, i, l)]).sum()).collect(),
        Epilogue::SumsOfB => (0..p.n).map(|j| (0..p.k).map(|l| vb[at(p.b, 0, l, j)]).sum()).collect(),
        _ => bias,
    };
    near(&format!("{p}: its vector"), of, &vector.numbers(), &sums, scale * p.m as f64);
}

/// A product with gaps between rows.
fn with_gaps(numbers: Numbers, [m, n, k]: [usize; 3], a: Order, b: Order, gap: usize) -> Product {
    let operand = |order, width| Operand { order, leading: width + gap, stride: 0 };
    let a = operand(a, if a == Order::Rows { k } else { m });
    let b = operand(b, if b == Order::Rows { n } else { k });
    Product { a, b, out_leading: n + gap, ..Product::new(numbers, [m, n, k]) }
}

const TYPES: [Numbers; 5] = [Numbers::F32, Numbers::Tf32, Numbers::F64, Numbers::Bf16, Numbers::F16];
const ORDERS: [Order; 2] = [Order::Rows, Order::Columns];

#[test]
fn products_of_all_layouts_and_types_are_right() {
    let Some((fake, mut products)) = stand_in() else { return };
    for numbers in TYPES {
        for (a, b) in ORDERS.into_iter().flat_map(|a| ORDERS.map(|b| (a, b))) {
            for sizes in [[1, 1, 1], [3, 5, 7], [8, 1, 33], [1, 64, 2], [17, 16, 4]] {
                for (gap, alpha, beta) in [(0, 1.0, 0.0), (3, 0.5, 1.0)] {
                    let product = with_gaps(numbers, sizes, a, b, gap);
                    check(&fake, &mut products, Row { product, alpha, beta });
                }
            }
        }
    }
}

#[test]
fn batches_are_right_also_where_they_share_a_factor() {
    let Some((fake, mut products)) = stand_in() else { return };
    for numbers in TYPES {
        for (a_stride, b_stride) in [(12, 20), (0, 21), (15, 0)] {
            let plain = Product::new(numbers, [3, 5, 4]);
            let a = Operand { stride: a_stride, ..plain.a };
            let b = Operand { stride: b_stride, ..plain.b };
            let product = Product { a, b, batch: 6, out_stride: 17, ..plain };
            check(&fake, &mut products, Row { product, alpha: 1.0, beta: 0.0 });
        }
    }
}

#[test]
fn epilogues_are_right() {
    let Some((fake, mut products)) = stand_in() else { return };
    for epilogue in Epilogue::ALL {
        for numbers in TYPES {
            for sizes in [[1, 1, 1], [5, 9, 3], [16, 130, 8]] {
                let orders = match epilogue {
                    // As in a weight's gradient, (out, in) = (rows, out)^T (rows, in).
                    Epilogue::SumsOfA => (Order::Columns, Order::Rows),
                    _ => (Order::Rows, Order::Columns),
                };
                let product = Product { epilogue, ..with_gaps(numbers, sizes, orders.0, orders.1, 0) };
                check(&fake, &mut products, Row { product, alpha: 1.0, beta: 0.0 });
            }
        }
    }
}

/// A small product with all of its memory.
struct Small {
    product: Product,
    memory: [Memory; 4],
    stream: TestStream,
}

impl Small {
    fn new(fake: &FakeCuda) -> Small {
        let memory = [12, 20, 15].map(|n| Memory::random(Type::F32, n, 1));
        let [a, b, out] = memory;
        let memory = [a, b, out, Memory::bytes(Type::F32, WORKSPACE)];
        Small { product: Product::new(Numbers::F32, [3, 5, 4]), memory, stream: TestStream::on(fake, 0) }
    }

    fn run(&mut self, products: &mut Products) -> Result<(), phalanx_cuda::Error> {
        let [a, b, out, workspace] = self.memory.each_mut().map(Memory::at);
        let operands = Operands::new(a, b, out);
        // SAFETY: the memory lives until the stream has done its work: it ends first.
        unsafe { products.run(&self.product, &operands, workspace, self.stream.handle()) }
    }
}

#[test]
fn a_captured_product_is_done_with_each_launch_of_its_graph_and_not_before() {
    let Some((fake, mut products)) = stand_in() else { return };
    let mut small = Small::new(&fake);
    small.run(&mut products).unwrap();
    small.stream.synchronize();
    let wanted = small.memory[2].numbers();
    let stream = TestStream::on(&fake, 0);
    let [a, b, out, workspace] = small.memory.each_mut().map(Memory::at);
    let (mut graph, ()) = stream
        .stream()
        .capture(|| {
            // SAFETY: the memory lives until the stream is awaited for the last time.
            unsafe { products.run(&small.product, &Operands::new(a, b, out), workspace, stream.handle()) }
        })
        .unwrap();
    for _ in 0..3 {
        small.memory[2].set(&[0.0; 15]);
        stream.synchronize();
        assert_eq!(small.memory[2].numbers(), [0.0; 15]);
        // SAFETY: as above.
        unsafe { graph.launch(stream.stream()) }.unwrap();
        stream.synchronize();
        assert_eq!(small.memory[2].numbers(), wanted);
    }
}

#[test]
fn a_product_is_planned_once_and_again_where_memory_is_aligned_otherwise() {
    let Some((fake, mut products)) = stand_in() else { return };
    let mut small = Small::new(&fake);
    (0..5).for_each(|_| small.run(&mut products).unwrap());
    assert_eq!((fake.cublaslt().calls("cublasLtMatmulAlgoGetHeuristic"), products.planned()), (1, 1));
    let [a, b, out, workspace] = small.memory.each_mut().map(Memory::at);
    let operands = Operands::new(a, b, out);
    // SAFETY: the memory holds one row less, and lives until the stream is awaited.
    unsafe {
        let product = Product::new(Numbers::F32, [2, 5, 4]);
        products.run(&product, &operands, workspace, small.stream.handle()).unwrap();
        let shifted = Operands { a: a.plus(4), ..operands };
        products.run(&product, &shifted, workspace, small.stream.handle()).unwrap();
    }
    small.stream.synchronize();
    assert_eq!((fake.cublaslt().calls("cublasLtMatmulAlgoGetHeuristic"), products.planned()), (3, 3));
    // The library's second factor is our first.
    let asked: Vec<String> = fake
        .cublaslt()
        .log()
        .into_iter()
        .filter(|line| line.starts_with("cublasLtMatmulPreferenceSetAttribute 6"))
        .collect();
    assert_eq!(
        asked[1..],
        ["256", "4"].map(|bytes| format!("cublasLtMatmulPreferenceSetAttribute 6 {bytes}"))
    );
}

#[test]
fn what_an_activation_keeps_is_part_of_how_a_product_is_aligned() {
    let Some((fake, mut products)) = stand_in() else { return };
    let mut small = Small::new(&fake);
    let product = Product { epilogue: Epilogue::GeluKept, ..small.product };
    let mut kept = Memory::bytes(Type::F32, product.kept_bytes() + 16);
    let [a, b, out, workspace] = small.memory.each_mut().map(Memory::at);
    for (shift, planned) in [(0, 1), (16, 2), (0, 2)] {
        let operands = Operands { kept: kept.at().plus(shift), ..Operands::new(a, b, out) };
        // SAFETY: the memory lives until the stream is awaited.
        unsafe { products.run(&product, &operands, workspace, small.stream.handle()) }.unwrap();
        assert_eq!(products.planned(), planned);
    }
    small.stream.synchronize();
}

#[test]
fn a_search_keeps_the_fastest_and_gives_it_its_workspace() {
    let Some((fake, mut products)) = stand_in() else { return };
    let mut small = Small::new(&fake);
    let [a, b, out, workspace] = small.memory.each_mut().map(Memory::at);
    let operands = Operands::new(a, b, out);
    let mut times = [30, 20, 10].map(Duration::from_micros).into_iter();
    let mut clock = |run: &mut dyn FnMut() -> Result<(), Error>| {
        run()?;
        Ok(times.next().unwrap())
    };
    let stream = small.stream.handle();
    // SAFETY: the memory lives until the stream is awaited.
    let chosen =
        unsafe { products.search(&small.product, &operands, &mut |_| workspace, stream, &mut clock) }
            .unwrap();
    assert_eq!((chosen.measured, chosen.proposal), (3, 2));
    assert_eq!((chosen.best, chosen.first), (Duration::from_micros(10), Duration::from_micros(30)));
    small.run(&mut products).unwrap();
    small.stream.synchronize();
    assert_eq!(fake.cublaslt().calls("cublasLtMatmulAlgoGetHeuristic"), 1);
    assert_eq!(fake.cublaslt().log().last().unwrap(), "cublasLtMatmul algo=2 workspace=4096 epilogue=1");
}

/// A search whose proposals take so long, one after the other.
fn searched(products: &mut Products, small: &mut Small, choices: &Choices, times: [u64; 3]) -> Chosen {
    let [a, b, out, workspace] = small.memory.each_mut().map(Memory::at);
    let mut times = times.map(Duration::from_micros).into_iter();
    let mut clock = |run: &mut dyn FnMut() -> Result<(), Error>| {
        run()?;
        Ok(times.next().unwrap())
    };
    let (operands, stream) = (Operands::new(a, b, out), small.stream.handle());
    // SAFETY: the memory lives until the stream is awaited.
    let chosen = unsafe {
        choices.search(products, &small.product, &operands, &mut |_| workspace, stream, &mut clock)
    };
    small.stream.synchronize();
    chosen.unwrap()
}

#[test]
fn what_a_search_chose_first_stands_for_all_who_share_a_folder() {
    let Some((fake, mut products)) = stand_in() else { return };
    let others = || CublasLt::open(&[fake.folder().to_owned()]).unwrap().products(1 << 20).unwrap();
    let (mut small, folder) = (Small::new(&fake), tempfile::tempdir().unwrap());
    let choices = |gpu: &str| Choices::new(Some(folder.path().join("kept")), gpu.to_owned());
    let [a, b, out, _] = small.memory.each_mut().map(Memory::at);
    let operands = Operands::new(a, b, out);
    let algorithm = |products: &mut Products, small: &mut Small| {
        small.run(products).unwrap();
        small.stream.synchronize();
        let log = fake.cublaslt().log();
        log.last().unwrap().split_whitespace().nth(1).unwrap().trim_start_matches("algo=").to_owned()
    };
    let recalled = |products: &mut Products, small: &Small, gpu: &str| {
        choices(gpu).recall(products, &small.product, &operands).unwrap()
    };
    assert!(!recalled(&mut products, &small, "a GPU"), "nothing was kept yet");
    assert_eq!(searched(&mut products, &mut small, &choices("a GPU"), [30, 10, 20]).proposal, 1);
    assert_eq!(algorithm(&mut products, &mut small), "1");
    // One that searched at the same time and found another.
    let mut late = others();
    assert_eq!(searched(&mut late, &mut small, &choices("a GPU"), [10, 20, 30]).proposal, 0);
    assert_eq!(algorithm(&mut late, &mut small), "1", "the first one stands");
    let mut next = others();
    assert!(recalled(&mut next, &small, "a GPU") && next.is_chosen(&small.product, &operands));
    assert_eq!(algorithm(&mut next, &mut small), "1");
    assert!(!recalled(&mut others(), &small, "another GPU"));
    let another = Product { m: small.product.m - 1, ..small.product };
    assert!(!choices("a GPU").recall(&mut others(), &another, &operands).unwrap());
    let mut with_less = CublasLt::open(&[fake.folder().to_owned()]).unwrap().products(512).unwrap();
    assert!(!recalled(&mut with_less, &small, "a GPU"), "a smaller workspace");
}

#[test]
fn what_was_kept_of_a_search_and_is_of_no_use_is_searched_for_anew() {
    let Some((fake, mut products)) = stand_in() else { return };
    let (mut small, folder) = (Small::new(&fake), tempfile::tempdir().unwrap());
    let choices = Choices::new(Some(folder.path().to_owned()), "a GPU".to_owned());
    let [a, b, out, _] = small.memory.each_mut().map(Memory::at);
    let operands = Operands::new(a, b, out);
    searched(&mut products, &mut small, &choices, [30, 10, 20]);
    let files: Vec<_> = std::fs::read_dir(folder.path()).unwrap().map(|file| file.unwrap().path()).collect();
    let [file] = &files[..] else { panic!("one choice, and nothing unfinished: {files:?}") };
    let whole = std::fs::read_to_string(file).unwrap();
    let beyond = format!("{}77\n", whole.strip_suffix("1\n").unwrap());
    for damaged in ["", &whole[..whole.len() - 1], "something else\n1\n", &beyond] {
        std::fs::write(file, damaged).unwrap();
        assert!(!choices.recall(&mut products, &small.product, &operands).unwrap(), "{damaged}");
        assert_eq!(searched(&mut products, &mut small, &choices, [30, 10, 20]).proposal, 1);
        assert_eq!(std::fs::read_to_string(file).unwrap(), whole);
    }
    // Without a folder, or with one that can't be, a search is as good for as long as the process lives.
    for nowhere in [None, Some(file.join("below a file"))] {
        let choices = Choices::new(nowhere, "a GPU".to_owned());
        assert_eq!(searched(&mut products, &mut small, &choices, [30, 20, 10]).proposal, 2);
        assert!(!choices.recall(&mut products, &small.product, &operands).unwrap());
    }
}

#[test]
fn a_proposal_that_fails_is_passed_over_unless_all_do() {
    let Some((fake, mut products)) = stand_in() else { return };
    let mut small = Small::new(&fake);
    let choices = Choices::new(None, "a GPU".to_owned());
    // CUBLAS_STATUS_EXECUTION_FAILED, of the first.
    fake.cublaslt().fail("cublasLtMatmul", 1, 13);
    let chosen = searched(&mut products, &mut small, &choices, [20, 10, 0]);
    assert_eq!((chosen.measured, chosen.proposal, chosen.first), (2, 2, Duration::from_micros(20)));
    (1..=3).for_each(|call| fake.cublaslt().fail("cublasLtMatmul", call, 13));
    let [a, b, out, workspace] = small.memory.each_mut().map(Memory::at);
    let mut clock = |run: &mut dyn FnMut() -> Result<(), Error>| run().map(|()| Duration::ZERO);
    let (operands, stream) = (Operands::new(a, b, out), small.stream.handle());
    // SAFETY: the memory lives until the stream is awaited.
    let refused =
        unsafe { products.search(&small.product, &operands, &mut |_| workspace, stream, &mut clock) };
    assert!(refused.unwrap_err().to_string().contains("CUBLAS_STATUS_EXECUTION_FAILED"));
}

#[test]
fn a_small_workspace_is_respected() {
    let Some((fake, products)) = stand_in() else { return };
    drop(products);
    let mut products = CublasLt::open(&[fake.folder().to_owned()]).unwrap().products(512).unwrap();
    let mut small = Small::new(&fake);
    small.run(&mut products).unwrap();
    small.stream.synchronize();
    assert_eq!(fake.cublaslt().log().last().unwrap(), "cublasLtMatmul algo=1 workspace=0 epilogue=1");
}

#[test]
fn each_failure_names_call_status_and_sizes_and_leaves_nothing() {
    let Some((fake, mut products)) = stand_in() else { return };
    let rows = [
        ("cublasLtMatmulDescCreate", 3, "CUBLAS_STATUS_ALLOC_FAILED"),
        ("cublasLtMatrixLayoutCreate", 3, "CUBLAS_STATUS_ALLOC_FAILED"),
        ("cublasLtMatmulDescSetAttribute", 7, "CUBLAS_STATUS_INVALID_VALUE"),
        ("cublasLtMatmulPreferenceCreate", 3, "CUBLAS_STATUS_ALLOC_FAILED"),
        ("cublasLtMatmulPreferenceSetAttribute", 7, "CUBLAS_STATUS_INVALID_VALUE"),
        ("cublasLtMatmulAlgoGetHeuristic", 15, "CUBLAS_STATUS_NOT_SUPPORTED"),
        ("cublasLtMatmul", 13, "CUBLAS_STATUS_EXECUTION_FAILED"),
    ];
    let mut small = Small::new(&fake);
    let lives = fake.cublaslt().live();
    for (call, code, status) in rows {
        fake.cublaslt().fail(call, 1, code);
        let words = small.run(&mut products).unwrap_err().to_string();
        let parts = ["cuBLASLt", call, status, "(3, 4) x (4, 5) in F32", "hint:"];
        assert!(parts.iter().all(|part| words.contains(part)), "{parts:?} aren't all in: {words}");
    }
    // The last one failed after its product was planned.
    assert_eq!(fake.cublaslt().live(), lives + 4);
    drop(products);
    assert_eq!(fake.cublaslt().live(), 0);
    fake.cublaslt().fail("cublasLtCreate", 1, 1);
    let words = CublasLt::open(&[fake.folder().to_owned()]).unwrap().products(0).unwrap_err().to_string();
    assert!(words.contains("CUBLAS_STATUS_NOT_INITIALIZED") && words.contains("nvidia-smi"), "{words}");
}

#[test]
fn sizes_that_do_not_fit_are_bugs() {
    let Some((_fake, mut products)) = stand_in() else { return };
    let plain = Product::new(Numbers::F32, [3, 5, 4]);
    let wrong = [
        Product { m: 0, ..plain },
        Product { out_leading: 4, ..plain },
        Product { a: Operand::transposed(2), ..plain },
        Product { batch: 2, out_stride: 5, ..plain },
        Product { epilogue: Epilogue::Bias, ..plain },
        Product { epilogue: Epilogue::ReluKept, batch: 2, out_stride: 15, ..plain },
    ];
    for product in wrong {
        let operands = Operands::new(Address(256), Address(256), Address(256));
        let ran = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let stream = phalanx_cuda::StreamHandle(std::ptr::null_mut());
            // SAFETY: nothing runs.
            unsafe { products.run(&product, &operands, Address(256), stream) }
        }));
        assert!(ran.is_err(), "{product:?}");
    }
}

#[test]
fn nothing_is_left_of_ten_thousand_calls() {
    let Some((fake, mut products)) = stand_in() else { return };
    let mut small = Small::new(&fake);
    (0..10_000).for_each(|_| small.run(&mut products).unwrap());
    small.stream.synchronize();
    // A handle, and a plan's four descriptors.
    assert_eq!(fake.cublaslt().live(), 5);
    drop(products);
    assert_eq!(fake.cublaslt().live(), 0);
    assert_eq!(
        (fake.cublaslt().calls("cublasLtMatmul"), fake.cublaslt().calls("cublasLtMatmulDescCreate")),
        (10_000, 1)
    );
}
