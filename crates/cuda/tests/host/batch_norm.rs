//! Batch normalisation, with what is fused into it, against the engine's in float64. Rows are the pixels of a batch.

use crate::compare::near;
use crate::program::{Arg, launch, there_is_a_compiler};
use crate::values::{decode, encode, floats, random, room};
use phalanx_cuda::{Element, Work};
use phalanx_tensor::{Device, Tensor, Then};

/// Roundings of float32 of sums of some hundred terms, and of the formula.
const STEPS: f64 = 60.0;
const EPS: f64 = 1e-5;
/// Rows of a piece: a few for each thread, and for one to have more than it takes at once.
const PIECE: usize = 300;
/// By which share of the way running statistics move, and where they begin.
const SHARE: f64 = 0.1;
const BEGIN: [f64; 2] = [0.5, 1.5];

#[derive(Clone, Copy, Debug, PartialEq)]
enum Follows {
    Nothing,
    Relu,
    AddRelu,
}

struct Case {
    element: Element,
    size: [usize; 2],
    follows: Follows,
    affine: bool,
}

/// Tensors of a case in the type of the module; weight and bias in float32.
struct Values {
    x: Vec<u8>,
    plus: Vec<u8>,
    grad: Vec<u8>,
    /// What is added to it, if it comes in two parts.
    more: Option<Vec<u8>>,
    weight: Option<Vec<u8>>,
    bias: Option<Vec<u8>>,
}

/// Buffers of floats that go from kernel to kernel.
#[derive(PartialEq)]
struct Statistics {
    means: Vec<u8>,
    variances: Vec<u8>,
    scales: Vec<u8>,
    running: [Vec<u8>; 2],
}

/// What comes of a gradient.
#[derive(PartialEq)]
struct Gradients {
    x: Vec<u8>,
    plus: Vec<u8>,
    weight: Vec<u8>,
    bias: Vec<u8>,
}

fn arg(values: &Option<Vec<u8>>) -> Arg<'_> {
    values.as_ref().map_or(Arg::Null, |values| Arg::In(values))
}

fn doubles(bytes: &[u8]) -> Vec<f64> {
    bytes.chunks_exact(8).map(bytemuck::pod_read_unaligned).collect()
}

impl Case {
    fn all() -> impl Iterator<Item = Case> {
        let sizes = [[2, 1], [65, 33], [300, 5], [1000, 2], [620, 72]];
        let kinds =
            [Follows::Nothing, Follows::Relu, Follows::AddRelu].map(|f| [(f, true), (f, false)]).concat();
        Element::ALL.into_iter().flat_map(move |element| {
            let kinds = kinds.clone();
            sizes.into_iter().flat_map(move |size| {
                kinds.clone().into_iter().map(move |(follows, affine)| Case {
                    element,
                    size,
                    follows,
                    affine,
                })
            })
        })
    }

    fn values(&self) -> Values {
        let (element, [rows, width]) = (self.element, self.size);
        let of = |n, low, high, stream| encode(element, &random(element, n, low, high, stream));
        let single = |low, high, stream| encode(Element::F32, &random(element, width, low, high, stream));
        let part = |low, high, stream| self.affine.then(|| single(low, high, stream));
        Values {
            x: of(rows * width, 1.0, 5.0, 1),
            plus: of(rows * width, -1.0, 1.0, 2),
            grad: of(rows * width, -1.0, 1.0, 3),
            more: None,
            weight: part(0.5, 1.5, 4),
            bias: part(-1.0, 1.0, 5),
        }
    }

    fn sizes(&self) -> [Arg<'static>; 2] {
        self.size.map(|n| Arg::Int(n as i64))
    }

    fn columns(&self) -> Work {
        let [width, bytes] = [self.size[1], self.element.bytes()].map(|n| n as u64);
        Work::Columns { pieces: self.pieces() as u64, width, bytes }
    }

    fn whole(&self) -> Work {
        let [width, bytes] = [self.size[1], self.element.bytes()].map(|n| n as u64);
        Work::WholeColumns { width, bytes }
    }

    fn channels(&self) -> Arg<'static> {
        Arg::Int(self.size[1] as i64)
    }

    /// Running statistics as they begin.
    fn running(&self) -> [Vec<u8>; 2] {
        BEGIN.map(|begin| encode(Element::F32, &vec![begin; self.size[1]]))
    }

    /// No gradient of a weight or bias where there is none.
    fn of_parameter<'a>(&self, out: &'a mut [u8]) -> Arg<'a> {
        if self.affine { Arg::Out(out) } else { Arg::Null }
    }

    fn added<'a>(&self, values: &'a Values) -> Arg<'a> {
        if self.follows == Follows::AddRelu { Arg::In(&values.plus) } else { Arg::Null }
    }

    fn relu(&self) -> Arg<'static> {
        Arg::Int(i64::from(self.follows != Follows::Nothing))
    }

    fn pieces(&self) -> usize {
        self.size[0].div_ceil(PIECE)
    }

    fn of_channels(&self) -> Work {
        Work::Elements(self.size[1] as u64)
    }

    fn per_channel(&self) -> Work {
        Work::Rows { rows: self.size[1] as u64, width: self.pieces() as u64 }
    }

    /// Two sums a channel, piece by piece.
    fn parts(&self) -> [Vec<u8>; 2] {
        [0; 2].map(|_| room(Element::F32, self.pieces() * self.size[1]))
    }

    /// Piece by piece; and the same by way of totals that several ranks may add up.
    fn statistics(&self, values: &Values) -> [Statistics; 2] {
        let [rows, width] = self.size;
        let [mut means, mut squares] = self.parts();
        let sizes = || self.sizes().into_iter().chain([Arg::Int(PIECE as i64)]);
        let mut args = vec![Arg::In(&values.x), Arg::Out(&mut means), Arg::Out(&mut squares)];
        args.extend(sizes());
        launch("batch_moments", self.element, self.columns(), &mut args);

        let mut found = [0; 3].map(|_| room(Element::F32, width));
        let mut running = self.running();
        let mut args = vec![Arg::In(&means), Arg::In(&squares)];
        args.extend(found.iter_mut().chain(&mut running).map(|out| Arg::Out(out)).chain(sizes()));
        args.extend([EPS, SHARE].map(Arg::Double));
        launch("batch_found", self.element, self.per_channel(), &mut args);
        let [of_means, of_variances, of_scales] = found;
        let found = Statistics { means: of_means, variances: of_variances, scales: of_scales, running };

        let mut totals = vec![0xa5; (1 + 2 * width) * 8];
        let mut args = vec![Arg::In(&means), Arg::In(&squares), Arg::Out(&mut totals)];
        args.extend(sizes());
        launch("batch_totals", self.element, self.per_channel(), &mut args);
        assert!(doubles(&totals)[0] == rows as f64 && doubles(&totals).iter().all(|x| x.is_finite()));
        let [mut means, mut variances, mut scales] = [0; 3].map(|_| room(Element::F32, width));
        let mut running = self.running();
        let mut args = vec![Arg::In(&totals)];
        args.extend([&mut means, &mut variances, &mut scales].map(|out| Arg::Out(out)));
        args.extend(running.iter_mut().map(|out| Arg::Out(out)));
        args.extend([self.channels(), Arg::Double(EPS), Arg::Double(SHARE)]);
        launch("batch_shared", self.element, self.of_channels(), &mut args);
        [found, Statistics { means, variances, scales, running }]
    }

    fn normalised(&self, values: &Values, statistics: &Statistics) -> Vec<u8> {
        self.normalised_with(values, statistics, Arg::Null)
    }

    fn normalised_with(&self, values: &Values, statistics: &Statistics, bits: Arg<'_>) -> Vec<u8> {
        let n = self.size[0] * self.size[1];
        let mut out = room(self.element, n);
        let mut args = vec![Arg::In(&values.x), Arg::In(&statistics.means), Arg::In(&statistics.scales)];
        args.extend([arg(&values.weight), arg(&values.bias), self.added(values), Arg::Out(&mut out), bits]);
        args.extend(self.sizes().into_iter().chain([self.relu()]));
        launch("batch_normalise", self.element, Work::Elements(n as u64), &mut args);
        out
    }

    /// Elements whose bits share a byte.
    fn neighbours(&self) -> usize {
        16 / self.element.bytes()
    }

    /// Where rows are made of whole bytes of them, the bits of what comes out, held against that.
    fn bits(&self, values: &Values, statistics: &Statistics, out: &[u8]) -> Option<Vec<u8>> {
        let (each, n) = (self.neighbours(), self.size[0] * self.size[1]);
        if self.follows == Follows::Nothing || !self.size[1].is_multiple_of(each) {
            return None;
        }
        let mut bits = vec![0xa5; n / each];
        let beside = self.normalised_with(values, statistics, Arg::Out(&mut bits));
        assert!(beside == out, "{:?}: what comes out beside bits", self.size);
        let passed: Vec<bool> =
            decode(self.element, out).into_iter().map(|y| y > 0.0 || y.is_nan()).collect();
        let want: Vec<u8> =
            passed.chunks(each).map(|of| (0..each).map(|j| u8::from(of[j]) << j).sum()).collect();
        assert!(bits == want, "{:?}: bits", self.size);
        assert!(passed.contains(&true) && passed.contains(&false), "{:?}: all of a kind", self.size);
        Some(bits)
    }

    /// Both at once.
    fn all_at_once(&self, values: &Values) -> (Statistics, Vec<u8>) {
        let [rows, width] = self.size;
        let mut out = room(self.element, rows * width);
        let mut found = [0; 3].map(|_| room(Element::F32, width));
        let mut running = self.running();
        let mut args = vec![Arg::In(&values.x), arg(&values.weight), arg(&values.bias), self.added(values)];
        args.push(Arg::Out(&mut out));
        args.extend(found.iter_mut().chain(&mut running).map(|out| Arg::Out(out)));
        args.extend(self.sizes().into_iter().chain([self.relu()]));
        args.extend([EPS, SHARE].map(Arg::Double));
        launch("batch_whole", self.element, self.whole(), &mut args);
        let [means, variances, scales] = found;
        (Statistics { means, variances, scales, running }, out)
    }

    /// What every kernel of a gradient takes first, but for the means.
    fn of_gradient<'a>(&self, values: &'a Values, mask: &'a Option<Vec<u8>>) -> Vec<Arg<'a>> {
        vec![Arg::In(&values.x), Arg::In(&values.grad), arg(&values.more), arg(mask)]
    }

    /// All gradients, piece by piece, of statistics that are the batch's own or were given; and the same by way of sums that several
    /// ranks may add up, to the bit.
    fn gradients(
        &self,
        values: &Values,
        statistics: &Statistics,
        mask: &Option<Vec<u8>>,
        given: bool,
    ) -> Gradients {
        self.gradients_by(values, statistics, [mask, &None], given)
    }

    /// The same by the output or by bits.
    fn gradients_by(
        &self,
        values: &Values,
        statistics: &Statistics,
        [mask, bits]: [&Option<Vec<u8>>; 2],
        given: bool,
    ) -> Gradients {
        let [rows, width] = self.size;
        let [mut grads, mut products] = self.parts();
        let mut args = self.of_gradient(values, mask);
        args.extend([arg(bits), Arg::In(&statistics.means), Arg::Out(&mut grads), Arg::Out(&mut products)]);
        args.extend(self.sizes().into_iter().chain([Arg::Int(PIECE as i64)]));
        launch("batch_sums", self.element, self.columns(), &mut args);

        let mut factors = room(Element::F32, 3 * width);
        let [mut weight, mut bias] = [0; 2].map(|_| room(Element::F32, width));
        let [pieces, count] = [self.pieces() as i64, if given { 0 } else { rows as i64 }];
        let mut args = vec![Arg::In(&grads), Arg::In(&products), Arg::In(&statistics.scales)];
        args.extend([arg(&values.weight), self.of_parameter(&mut weight), self.of_parameter(&mut bias)]);
        args.extend([Arg::Out(&mut factors), Arg::Int(pieces), self.channels(), Arg::Double(count as f64)]);
        launch("batch_gradients_found", self.element, self.per_channel(), &mut args);

        let mut sums = vec![0xa5; 2 * width * 8];
        let mut args = vec![Arg::In(&grads), Arg::In(&products), Arg::Out(&mut sums)];
        args.extend([Arg::Int(pieces), self.channels()]);
        launch("merge_sums", self.element, self.per_channel(), &mut args);
        // Only the first of the totals tells of gradients.
        let totals = bytemuck::bytes_of(&(rows as f64)).to_vec();
        let [mut weight_too, mut bias_too] = [0; 2].map(|_| room(Element::F32, width));
        let mut args = vec![Arg::In(&sums), Arg::In(&statistics.scales)];
        args.extend([self.of_parameter(&mut weight_too), self.of_parameter(&mut bias_too), self.channels()]);
        launch("batch_channel_gradients", self.element, self.of_channels(), &mut args);
        let mut factors_too = room(Element::F32, 3 * width);
        let mut args = vec![Arg::In(&sums), Arg::In(&totals), Arg::In(&statistics.scales)];
        args.extend([arg(&values.weight), Arg::Out(&mut factors_too), self.channels()]);
        launch("batch_factors", self.element, self.of_channels(), &mut args);
        let same = weight == weight_too && bias == bias_too && (given || factors == factors_too);
        assert!(same, "gradients by way of sums");

        let [mut x, mut plus] = [0; 2].map(|_| room(self.element, rows * width));
        let mut args = self.of_gradient(values, mask);
        args.extend([arg(bits), Arg::In(&statistics.means), Arg::In(&factors)]);
        args.extend([Arg::Out(&mut x), self.of_added(&mut plus)]);
        args.extend(self.sizes());
        launch("batch_input_gradient", self.element, Work::Elements((rows * width) as u64), &mut args);
        Gradients { x, plus, weight, bias }
    }

    fn of_added<'a>(&self, out: &'a mut [u8]) -> Arg<'a> {
        if self.follows == Follows::AddRelu { Arg::Out(out) } else { Arg::Null }
    }

    /// The same at once.
    fn gradients_at_once(
        &self,
        values: &Values,
        statistics: &Statistics,
        mask: &Option<Vec<u8>>,
        given: bool,
    ) -> Gradients {
        let [rows, width] = self.size;
        let mut factors = room(Element::F32, 3 * width);
        let [mut weight, mut bias] = [0; 2].map(|_| room(Element::F32, width));
        let [mut x, mut plus] = [0; 2].map(|_| room(self.element, rows * width));
        let mut args = self.of_gradient(values, mask);
        let [means, scales] = [&statistics.means, &statistics.scales].map(|of| Arg::In(of));
        args.extend([means, scales, arg(&values.weight), Arg::Out(&mut x)]);
        args.extend([self.of_added(&mut plus), self.of_parameter(&mut weight), self.of_parameter(&mut bias)]);
        args.extend([Arg::Out(&mut factors)].into_iter().chain(self.sizes()));
        args.push(Arg::Double(if given { 0.0 } else { rows as f64 }));
        launch("batch_whole_gradient", self.element, self.whole(), &mut args);
        Gradients { x, plus, weight, bias }
    }

    fn near(&self, what: &str, got: &[u8], want: &[f64], scale: f64) {
        self.near_in(self.element, what, got, want, scale);
    }

    fn near_in(&self, element: Element, what: &str, got: &[u8], want: &[f64], scale: f64) {
        let what = format!("{what}, {:?}, {:?}", self.size, self.follows);
        near(&what, element, &decode(element, got), want, scale, STEPS);
    }

    fn check(&self) {
        let (values, engine) = (self.values(), Engine::new(self));
        let [by_pieces, by_totals] = self.statistics(&values);
        let out = self.normalised(&values, &by_pieces);
        let (at_once, out_at_once) = self.all_at_once(&values);
        for (statistics, out) in [(&by_pieces, &out), (&at_once, &out_at_once)] {
            self.check_statistics(statistics, &engine);
            // Two values of a channel that are nearly the same are told apart by little.
            self.near("output", out, &engine.out, self.scale(statistics));
        }
        self.check_statistics(&by_totals, &engine);

        let bits = self.bits(&values, &by_pieces, &out);
        let mask = (self.follows != Follows::Nothing).then_some(out);
        let found = [
            self.gradients(&values, &by_pieces, &mask, false),
            self.gradients_at_once(&values, &by_pieces, &mask, false),
        ];
        found.iter().for_each(|gradients| self.check_gradients(gradients, &by_pieces, &engine));
        self.check_parts(&values, &by_pieces, &mask, &found);
        if bits.is_some() {
            let by_bits = self.gradients_by(&values, &by_pieces, [&None, &bits], false);
            assert!(by_bits == found[0], "{:?}, {:?}: gradients by bits", self.size, self.follows);
        }
        let given = [
            self.gradients(&values, &by_pieces, &mask, true),
            self.gradients_at_once(&values, &by_pieces, &mask, true),
        ];
        for Gradients { x, .. } in given {
            let scale = self.scale(&by_pieces);
            self.near("gradient of the input with given statistics", &x, &engine.grad_given, scale);
        }
    }

    /// A gradient in two parts is their sum, to the bit.
    fn check_parts(
        &self,
        values: &Values,
        statistics: &Statistics,
        mask: &Option<Vec<u8>>,
        [by_pieces, at_once]: &[Gradients; 2],
    ) {
        let n = self.size[0] * self.size[1];
        // Parts whose sum is rounded.
        let more = random(self.element, n, -0.5, 0.5, 9);
        let sum = |(a, b): (&f64, &f64)| f64::from(*a as f32 + *b as f32);
        let own = decode(self.element, &values.grad);
        let whole: Vec<f64> = own.iter().zip(&more).map(sum).collect();
        let of = |grad: Vec<u8>, more: Option<Vec<u8>>| Values {
            x: values.x.clone(),
            plus: values.plus.clone(),
            grad,
            more,
            weight: values.weight.clone(),
            bias: values.bias.clone(),
        };
        let parts = of(values.grad.clone(), Some(encode(self.element, &more)));
        let whole = of(encode(self.element, &whole), None);
        let found = [&parts, &whole].map(|values| {
            let all = [
                self.gradients(values, statistics, mask, false),
                self.gradients_at_once(values, statistics, mask, false),
            ];
            assert!(all[0] != *by_pieces && all[1] != *at_once, "{:?}: nothing was added", self.size);
            all
        });
        assert!(found[0] == found[1], "{:?}, {:?}: a gradient in two parts", self.size, self.follows);
    }

    fn check_statistics(&self, statistics: &Statistics, engine: &Engine) {
        let single = |what, got: &[u8], want: &[f64]| self.near_in(Element::F32, what, got, want, 5.0);
        single("means", &statistics.means, &engine.stats[0]);
        single("variances", &statistics.variances, &engine.stats[1]);
        let rows = self.size[0] as f64;
        let scales: Vec<f64> = floats(&statistics.variances)
            .into_iter()
            .map(|variance| 1.0 / (f64::from(variance) + EPS).sqrt())
            .collect();
        self.near_in(Element::F32, "scales", &statistics.scales, &scales, 0.0);
        for (i, times) in [1.0, rows / (rows - 1.0)].into_iter().enumerate() {
            let moved = |found: &f64| BEGIN[i] * (1.0 - SHARE) + found * times * SHARE;
            let want: Vec<f64> = engine.stats[i].iter().map(moved).collect();
            single("running statistics", &statistics.running[i], &want);
        }
    }

    fn check_gradients(&self, gradients: &Gradients, statistics: &Statistics, engine: &Engine) {
        let many = (self.size[0] as f64).sqrt();
        let (scale, steep) = (self.scale(statistics), self.steep(statistics));
        self.near("gradient of the input", &gradients.x, &engine.grads[0], 4.0 * scale * steep);
        if self.affine {
            let single =
                |what, got: &[u8], want: &[f64], scale| self.near_in(Element::F32, what, got, want, scale);
            single("gradient of the weight", &gradients.weight, &engine.grads[1], scale * many);
            single("gradient of the bias", &gradients.bias, &engine.grads[2], many);
        }
        if self.follows == Follows::AddRelu {
            self.near("gradient of what is added", &gradients.plus, &engine.grads[3], 0.0);
        }
    }

    fn steep(&self, statistics: &Statistics) -> f64 {
        f64::from(floats(&statistics.scales).into_iter().fold(1.0, f32::max))
    }

    fn scale(&self, statistics: &Statistics) -> f64 {
        4.0 * self.steep(statistics)
    }
}

/// What the engine comes to.
struct Engine {
    stats: [Vec<f64>; 2],
    out: Vec<f64>,
    /// Of the input, the weight, the bias and what is added.
    grads: [Vec<f64>; 4],
    /// Of the input, where the statistics are taken as given.
    grad_given: Vec<f64>,
}

impl Engine {
    fn new(case: &Case) -> Engine {
        let (device, values) = (Device::cpu(1), case.values());
        let of_type = |element, bytes: &[u8], shape: &[usize]| {
            Tensor::from_slice(&device, &decode(element, bytes), shape)
        };
        let of = |bytes: &[u8], shape: &[usize]| of_type(case.element, bytes, shape);
        let (x, plus) =
            (of(&values.x, &case.size).requires_grad(), of(&values.plus, &case.size).requires_grad());
        let [weight, bias] = [&values.weight, &values.bias].map(|part| {
            part.as_ref().map(|part| of_type(Element::F32, part, &case.size[1..]).requires_grad())
        });
        let then = match case.follows {
            Follows::Nothing => Then::Nothing,
            Follows::Relu => Then::Relu,
            Follows::AddRelu => Then::AddRelu(&plus),
        };
        let normed = x.batch_norm(weight.as_ref(), bias.as_ref(), EPS, then, None, None);
        let given = x.batch_norm_with(&normed.stats, weight.as_ref(), bias.as_ref(), EPS, then);
        let grad = of(&values.grad, &case.size);
        let grads = (&normed.out * &grad).sum_all().backward();
        let get = |of: Option<&Tensor>| of.map_or(Vec::new(), |of| grads.get(of).unwrap().to_vec());
        let plus = (case.follows == Follows::AddRelu).then_some(&plus);
        let of_given = (given * &grad).sum_all().backward();
        Engine {
            stats: [normed.stats.mean.to_vec(), normed.stats.variance.to_vec()],
            out: normed.out.detach().to_vec(),
            grads: [get(Some(&x)), get(weight.as_ref()), get(bias.as_ref()), get(plus)],
            grad_given: of_given.get(&x).unwrap().to_vec(),
        }
    }
}

#[test]
fn everything_about_a_batch_is_that_of_the_engine() {
    if !there_is_a_compiler() {
        return;
    }
    Case::all().for_each(|case| case.check());
}
