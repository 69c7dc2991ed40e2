//! Batch normalisation, with what is fused into it, against the engine's in float64. Rows are the pixels of a batch.

use crate::compare::near;
use crate::program::{Arg, launch, there_is_a_compiler};
use crate::values::{decode, encode, floats, random, room};
use phalanx_cuda::{Element, Work};
use phalanx_tensor::{Device, Tensor, Then};

/// Roundings of float32 of sums of some hundred terms, and of the formula.
const STEPS: f64 = 60.0;
const EPS: f64 = 1e-5;
/// Rows of a piece.
const PIECE: usize = 64;

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
    weight: Option<Vec<u8>>,
    bias: Option<Vec<u8>>,
}

/// Buffers of doubles and floats that go from kernel to kernel.
struct Statistics {
    moments: Vec<u8>,
    means: Vec<u8>,
    variances: Vec<u8>,
    scales: Vec<u8>,
}

fn arg(values: &Option<Vec<u8>>) -> Arg<'_> {
    values.as_ref().map_or(Arg::Null, |values| Arg::In(values))
}

fn doubles(bytes: &[u8]) -> Vec<f64> {
    bytes.chunks_exact(8).map(bytemuck::pod_read_unaligned).collect()
}

impl Case {
    fn all() -> impl Iterator<Item = Case> {
        let sizes = [[2, 1], [65, 33], [300, 5], [1000, 2]];
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
            weight: part(0.5, 1.5, 4),
            bias: part(-1.0, 1.0, 5),
        }
    }

    fn sizes(&self) -> [Arg<'static>; 2] {
        self.size.map(|n| Arg::Int(n as i64))
    }

    fn columns(&self) -> Work {
        Work::Columns { pieces: self.pieces() as u64, width: self.size[1] as u64 }
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

    fn statistics(&self, values: &Values) -> Statistics {
        let [rows, width] = self.size;
        let [mut means, mut squares] = self.parts();
        let mut args = vec![Arg::In(&values.x), Arg::Out(&mut means), Arg::Out(&mut squares)];
        args.extend(self.sizes().into_iter().chain([Arg::Int(PIECE as i64)]));
        launch("batch_moments", self.element, self.columns(), &mut args);
        let mut moments = vec![0xa5; 2 * width * 8];
        let mut args = vec![Arg::In(&means), Arg::In(&squares), Arg::Out(&mut moments)];
        args.extend(self.sizes().into_iter().chain([Arg::Int(PIECE as i64)]));
        launch("merge_moments", self.element, self.per_channel(), &mut args);
        let [mut means, mut variances, mut scales] = [0; 3].map(|_| room(Element::F32, width));
        launch(
            "batch_statistics",
            self.element,
            self.of_channels(),
            &mut [
                Arg::In(&moments),
                Arg::Out(&mut means),
                Arg::Out(&mut variances),
                Arg::Out(&mut scales),
                Arg::Int(width as i64),
                Arg::Double(rows as f64),
                Arg::Double(EPS),
            ],
        );
        Statistics { moments, means, variances, scales }
    }

    fn normalised(&self, values: &Values, statistics: &Statistics) -> Vec<u8> {
        let n = self.size[0] * self.size[1];
        let mut out = room(self.element, n);
        let mut args = vec![Arg::In(&values.x), Arg::In(&statistics.means), Arg::In(&statistics.scales)];
        args.extend([arg(&values.weight), arg(&values.bias)]);
        args.push(if self.follows == Follows::AddRelu { Arg::In(&values.plus) } else { Arg::Null });
        args.push(Arg::Out(&mut out));
        args.extend(self.sizes().into_iter().chain([Arg::Int(i64::from(self.follows != Follows::Nothing))]));
        launch("batch_normalise", self.element, Work::Elements(n as u64), &mut args);
        out
    }

    fn sums(&self, values: &Values, statistics: &Statistics, mask: &Option<Vec<u8>>) -> Vec<u8> {
        let [mut grads, mut products] = self.parts();
        let mut args = vec![Arg::In(&values.x), Arg::In(&values.grad), arg(mask), Arg::In(&statistics.means)];
        args.extend([Arg::Out(&mut grads), Arg::Out(&mut products)]);
        args.extend(self.sizes().into_iter().chain([Arg::Int(PIECE as i64)]));
        launch("batch_sums", self.element, self.columns(), &mut args);
        let mut sums = vec![0xa5; 2 * self.size[1] * 8];
        launch(
            "merge_sums",
            self.element,
            self.per_channel(),
            &mut [
                Arg::In(&grads),
                Arg::In(&products),
                Arg::Out(&mut sums),
                Arg::Int(self.pieces() as i64),
                Arg::Int(self.size[1] as i64),
            ],
        );
        sums
    }

    /// The gradients of the input and of what was added; of statistics that were given where there are no `sums`.
    fn of_input(
        &self,
        values: &Values,
        statistics: &Statistics,
        mask: &Option<Vec<u8>>,
        sums: Option<&[u8]>,
    ) -> [Vec<u8>; 2] {
        let [rows, width] = self.size;
        let mut factors = room(Element::F32, 3 * width);
        launch(
            "batch_factors",
            self.element,
            self.of_channels(),
            &mut [
                sums.map_or(Arg::Null, Arg::In),
                Arg::In(&statistics.scales),
                arg(&values.weight),
                Arg::Out(&mut factors),
                Arg::Int(width as i64),
                Arg::Double(rows as f64),
            ],
        );
        let mut out = [0; 2].map(|_| room(self.element, rows * width));
        let [x, plus] = &mut out;
        let mut args = vec![
            Arg::In(&values.x),
            Arg::In(&values.grad),
            arg(mask),
            Arg::In(&statistics.means),
            Arg::In(&factors),
        ];
        args.push(Arg::Out(x));
        args.push(if self.follows == Follows::AddRelu { Arg::Out(plus) } else { Arg::Null });
        args.extend(self.sizes());
        launch("batch_input_gradient", self.element, Work::Elements((rows * width) as u64), &mut args);
        out
    }

    fn of_channels_gradients(&self, sums: &[u8], statistics: &Statistics) -> [Vec<u8>; 2] {
        let mut out = [0; 2].map(|_| room(Element::F32, self.size[1]));
        let [weight, bias] = &mut out;
        launch(
            "batch_channel_gradients",
            self.element,
            self.of_channels(),
            &mut [
                Arg::In(sums),
                Arg::In(&statistics.scales),
                if self.affine { Arg::Out(weight) } else { Arg::Null },
                if self.affine { Arg::Out(bias) } else { Arg::Null },
                Arg::Int(self.size[1] as i64),
            ],
        );
        out
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
        let statistics = self.statistics(&values);
        near("means", Element::F32, &decode(Element::F32, &statistics.means), &engine.stats[0], 5.0, STEPS);
        near(
            "variances",
            Element::F32,
            &decode(Element::F32, &statistics.variances),
            &engine.stats[1],
            5.0,
            STEPS,
        );
        assert!(doubles(&statistics.moments).iter().all(|x| x.is_finite()));
        let mut scales = room(Element::F32, self.size[1]);
        launch(
            "batch_scales",
            self.element,
            self.of_channels(),
            &mut [
                Arg::In(&statistics.variances),
                Arg::Out(&mut scales),
                Arg::Int(self.size[1] as i64),
                Arg::Double(EPS),
            ],
        );
        assert!(scales == statistics.scales, "scales of given variances");

        let out = self.normalised(&values, &statistics);
        // Two values of a channel that are nearly the same are told apart by little.
        let steep = floats(&statistics.scales).into_iter().fold(1.0, f32::max);
        let scale = 4.0 * f64::from(steep);
        self.near("output", &out, &engine.out, scale);

        let mask = (self.follows != Follows::Nothing).then_some(out);
        let sums = self.sums(&values, &statistics, &mask);
        let [weight, bias] = self.of_channels_gradients(&sums, &statistics);
        let [x, plus] = self.of_input(&values, &statistics, &mask, Some(&sums));
        let many = (self.size[0] as f64).sqrt();
        self.near("gradient of the input", &x, &engine.grads[0], 4.0 * scale * f64::from(steep));
        if self.affine {
            let single =
                |what, got: &[u8], want: &[f64], scale| self.near_in(Element::F32, what, got, want, scale);
            single("gradient of the weight", &weight, &engine.grads[1], scale * many);
            single("gradient of the bias", &bias, &engine.grads[2], many);
        }
        if self.follows == Follows::AddRelu {
            self.near("gradient of what is added", &plus, &engine.grads[3], 0.0);
        }
        let [given, _] = self.of_input(&values, &statistics, &mask, None);
        self.near("gradient of the input with given statistics", &given, &engine.grad_given, scale);
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
        let normed = x.batch_norm(weight.as_ref(), bias.as_ref(), EPS, then, None);
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
