//! Layer normalisation against the engine's in float64.

use crate::compare::near;
use crate::program::{Arg, launch, there_is_a_compiler};
use crate::values::{decode, encode, floats, random, room};
use phalanx_cuda::{Element, Work};
use phalanx_tensor::{Device, Tensor};

/// Roundings of float32 of sums of some hundred terms, and of the formula.
const STEPS: f64 = 60.0;
const EPS: f64 = 1e-5;
/// Rows of a piece.
const PIECE: usize = 16;

/// Which kernels: those of rows that come out in their own type, and of rows of float32 that come out in the module's.
#[derive(Clone, Copy)]
enum Kind {
    Own,
    Rounded,
}

struct Case {
    kind: Kind,
    element: Element,
    size: [usize; 2],
    x: Vec<f64>,
    weight: Option<Vec<f64>>,
    bias: Option<Vec<f64>>,
    grad: Vec<f64>,
}

impl Kind {
    /// The type of what comes in and of its gradient.
    fn input(self, element: Element) -> Element {
        match self {
            Kind::Own => element,
            Kind::Rounded => Element::F32,
        }
    }

    /// The name of one of the kernels.
    fn kernel(self, rest: &str) -> String {
        match self {
            Kind::Own => format!("layer_norm{rest}"),
            Kind::Rounded => format!("rounded_layer_norm{rest}"),
        }
    }
}

fn arg(values: &Option<Vec<u8>>) -> Arg<'_> {
    values.as_ref().map_or(Arg::Null, |values| Arg::In(values))
}

impl Case {
    fn new(kind: Kind, element: Element, size: [usize; 2], affine: bool) -> Case {
        let n = size[0] * size[1];
        let part = |low, high, stream| affine.then(|| random(element, size[1], low, high, stream));
        let (weight, bias) = (part(0.5, 1.5, 3), part(-1.0, 1.0, 4));
        let of_input = kind.input(element);
        Case {
            kind,
            element,
            size,
            x: random(of_input, n, 1.0, 5.0, 1),
            weight,
            bias,
            grad: random(element, n, -1.0, 1.0, 2),
        }
    }

    fn work(&self) -> Work {
        Work::Rows { rows: self.size[0] as u64, width: self.size[1] as u64 }
    }

    /// The output, and the gradients of the input, the weight and the bias.
    fn reference(&self) -> [Vec<f64>; 4] {
        let device = Device::cpu(1);
        let of = |values: &[f64], shape: &[usize]| Tensor::from_slice(&device, values, shape).requires_grad();
        let x = of(&self.x, &self.size);
        let [weight, bias] =
            [&self.weight, &self.bias].map(|part| part.as_ref().map(|p| of(p, &self.size[1..])));
        let y = x.layer_norm(1, weight.as_ref(), bias.as_ref(), EPS);
        let grads = (&y * Tensor::from_slice(&device, &self.grad, self.size)).sum_all().backward();
        let grad = |of: Option<&Tensor>| of.map_or(Vec::new(), |of| grads.get(of).unwrap().to_vec());
        [y.detach().to_vec(), grad(Some(&x)), grad(weight.as_ref()), grad(bias.as_ref())]
    }

    fn check(&self) {
        let (element, [rows, width]) = (self.element, self.size);
        let [want, want_x, want_w, want_b] = self.reference();
        let (input, name) = (self.kind.input(element), |rest: &str| self.kind.kernel(rest));
        let near = |what: &str, of: Element, got: &[u8], want: &[f64], scale: f64| {
            near(what, of, &decode(of, got), want, scale, STEPS);
        };
        let (x, grad) = (encode(input, &self.x), encode(element, &self.grad));
        let [weight, bias] =
            [&self.weight, &self.bias].map(|part| part.as_ref().map(|p| encode(Element::F32, p)));
        let sizes = || [Arg::Int(rows as i64), Arg::Int(width as i64)];

        let (mut out, mut means, mut scales) =
            (room(element, rows * width), room(Element::F32, rows), room(Element::F32, rows));
        let mut args = vec![Arg::In(&x), arg(&weight), arg(&bias)];
        args.extend(
            [Arg::Out(&mut out), Arg::Out(&mut means), Arg::Out(&mut scales)].into_iter().chain(sizes()),
        );
        args.push(Arg::Float(EPS as f32));
        launch(&name(""), element, self.work(), &mut args);
        near(&name(""), element, &out, &want, 4.0);
        assert!(floats(&means).iter().chain(&floats(&scales)).all(|x| x.is_finite()));

        let mut args = vec![Arg::In(&x), arg(&weight), Arg::In(&grad), Arg::In(&means), Arg::In(&scales)];
        let mut out = room(input, rows * width);
        args.push(Arg::Out(&mut out));
        args.extend(sizes());
        launch(&name("_gradient"), element, self.work(), &mut args);
        let largest = want_x.iter().fold(1.0, |a: f64, g| a.max(g.abs()));
        near(&name("_gradient"), input, &out, &want_x, 4.0 * largest);

        if self.weight.is_none() {
            return;
        }
        let pieces = rows.div_ceil(PIECE);
        let mut parts = [room(Element::F32, pieces * width), room(Element::F32, pieces * width)];
        let [weight_parts, bias_parts] = &mut parts;
        let mut args = vec![Arg::In(&x), Arg::In(&grad), Arg::In(&means), Arg::In(&scales)];
        args.extend([Arg::Out(weight_parts), Arg::Out(bias_parts)].into_iter().chain(sizes()));
        args.push(Arg::Int(PIECE as i64));
        launch(
            &name("_columns"),
            element,
            Work::Columns { pieces: pieces as u64, width: width as u64, bytes: element.bytes() as u64 },
            &mut args,
        );
        let outputs = |both: bool| {
            let [mut of_weight, mut of_bias] = [0; 2].map(|_| room(Element::F32, width));
            let bias = if both { Arg::Out(&mut of_bias) } else { Arg::Null };
            let work = Work::Rows { rows: 2 * width as u64, width: pieces as u64 };
            let (inputs, weight) = (parts.each_ref().map(|part| Arg::In(part)), Arg::Out(&mut of_weight));
            let mut args = inputs.into_iter().collect::<Vec<_>>();
            args.extend([weight, bias, Arg::Int(width as i64), Arg::Int(pieces as i64)]);
            launch("layer_norm_parameters", element, work, &mut args);
            [of_weight, of_bias]
        };
        let [of_weight, of_bias] = outputs(true);
        assert!(outputs(false)[0] == of_weight, "the gradient of a weight without a bias");
        for (out, want) in [(of_weight, want_w), (of_bias, want_b)] {
            near(&name("_columns"), Element::F32, &out, &want, 2.0 * (rows as f64).sqrt());
        }
    }
}

/// Rows of a band.
const BAND: usize = 3;

impl Case {
    /// The kernels of which a thread has its part of a row at once: rows that are sums of two, or are not, with a gradient that more is
    /// added to and that is rounded beside, or is not.
    fn check_whole(mut self, more: bool) {
        let (element, [rows, width], n) = (self.element, self.size, self.size[0] * self.size[1]);
        let (input, name) = (self.kind.input(element), |rest: &str| self.kind.kernel(rest));
        let kinds = format!("{:?} of {element:?}, {rows} x {width}", name(""));
        let near = |what: &str, of: Element, got: &[u8], want: &[f64], scale: f64| {
            near(what, of, &decode(of, got), want, scale, STEPS);
        };
        let work = |bands: usize| Work::Bands { bands: bands as u64, width: width as u64 };
        let sizes = || [Arg::Int(rows as i64), Arg::Int(width as i64)];
        let [weight, bias] =
            [&self.weight, &self.bias].map(|part| part.as_ref().map(|p| encode(Element::F32, p)));

        let (x, branch) = (encode(input, &self.x), random(element, n, -1.0, 1.0, 5));
        let (of_branch, mut sums) = (encode(element, &branch), room(input, n));
        let mut outputs = [room(element, n), room(Element::F32, rows), room(Element::F32, rows)];
        let [out, means, scales] = &mut outputs;
        let mut args = vec![Arg::In(&x)];
        args.push(if more { Arg::In(&of_branch) } else { Arg::Null });
        args.push(if more { Arg::Out(&mut sums) } else { Arg::Null });
        args.extend([arg(&weight), arg(&bias), Arg::Out(out), Arg::Out(means), Arg::Out(scales)]);
        args.extend(sizes());
        args.push(Arg::Float(EPS as f32));
        launch(&name("_whole"), element, work(rows), &mut args);
        if more {
            // In float32 as a sum is, and then in the type of the rows.
            let sum = |(x, branch): (&f64, &f64)| f64::from(*x as f32 + *branch as f32);
            let want = encode(input, &self.x.iter().zip(&branch).map(sum).collect::<Vec<_>>());
            assert!(sums == want, "{kinds}: sums");
            self.x = decode(input, &want);
        }
        let [want, want_x, want_w, want_b] = self.reference();
        let [out, means, scales] = outputs;
        near(&name("_whole"), element, &out, &want, 4.0);

        let (x, grad) = (encode(input, &self.x), encode(element, &self.grad));
        let plus = random(input, n, -1.0, 1.0, 6);
        let of_plus = encode(input, &plus);
        let bands = rows.div_ceil(BAND);
        let run = |out: &mut Option<Vec<u8>>,
                   plus: Option<&[u8]>,
                   halves: &mut Option<Vec<u8>>,
                   parts: &mut [Option<Vec<u8>>; 2]| {
            let mut args = vec![Arg::In(&x), arg(&weight), Arg::In(&grad)];
            args.extend([plus.map_or(Arg::Null, Arg::In), Arg::In(&means), Arg::In(&scales)]);
            args.extend([out, halves].into_iter().chain(parts).map(|part| match part {
                Some(part) => Arg::Out(part),
                None => Arg::Null,
            }));
            args.extend(sizes());
            args.push(Arg::Int(BAND as i64));
            launch(&name("_whole_gradient"), element, work(bands), &mut args);
        };
        let mut parts = [0; 2].map(|_| Some(room(Element::F32, bands * width)));
        let mut out = Some(room(input, n));
        run(&mut out, None, &mut None, &mut parts);
        let alone = out.unwrap_or_default();
        let largest = want_x.iter().fold(1.0, |a: f64, g| a.max(g.abs()));
        near(&name("_whole_gradient"), input, &alone, &want_x, 4.0 * largest);
        if more {
            let (mut halves, mut of_weight) = (Some(room(element, n)), [parts[0].clone(), None]);
            let mut summed = Some(room(input, n));
            run(&mut summed, Some(&of_plus), &mut halves, &mut of_weight);
            assert!(of_weight[0] == parts[0], "{kinds}: what nobody wants changes nothing");
            let (mut of_parameters, summed) = (parts.clone(), summed.unwrap_or_default());
            run(&mut None, None, &mut None, &mut of_parameters);
            assert!(of_parameters == parts, "{kinds}: gradients of weight and bias alone");
            let sum = |(own, plus): (f64, &f64)| f64::from(own as f32 + *plus as f32);
            let want: Vec<f64> = decode(input, &alone).into_iter().zip(&plus).map(sum).collect();
            assert!(summed == encode(input, &want), "{kinds}: a sum of gradients");
            assert!(halves == Some(encode(element, &decode(input, &summed))), "{kinds}: rounded beside");
        }
        if self.weight.is_none() {
            return;
        }
        let both = |wanted: [bool; 2]| {
            let mut outs = [0; 2].map(|_| room(Element::F32, width));
            let mut args: Vec<Arg<'_>> = parts.iter().map(arg).collect();
            args.extend(outs.iter_mut().zip(wanted).map(|(out, wanted)| match wanted {
                true => Arg::Out(out),
                false => Arg::Null,
            }));
            args.extend([width, bands].map(|n| Arg::Int(n as i64)));
            let work = Work::Rows { rows: (width / 4) as u64, width: (8 * bands) as u64 };
            launch("layer_norm_bands", element, work, &mut args);
            outs
        };
        let [of_weight, of_bias] = both([true; 2]);
        assert!(both([true, false])[0] == of_weight && both([false, true])[1] == of_bias, "{kinds}");
        for (out, want) in [(of_weight, want_w), (of_bias, want_b)] {
            near(&name("_whole_gradient"), Element::F32, &out, &want, 2.0 * (rows as f64).sqrt());
        }
    }
}

#[test]
fn rows_and_all_gradients_are_those_of_the_engine() {
    if !there_is_a_compiler() {
        return;
    }
    for (element, affine) in Element::ALL.into_iter().flat_map(|element| [(element, true), (element, false)])
    {
        for size in [[1, 2], [7, 33], [40, 257], [3, 1100], [5, 1104]] {
            for kind in [Kind::Own, Kind::Rounded] {
                Case::new(kind, element, size, affine).check();
            }
        }
    }
}

#[test]
fn rows_that_threads_hold_are_those_of_the_engine_with_all_that_goes_along() {
    if !there_is_a_compiler() {
        return;
    }
    for (element, affine) in Element::ALL.into_iter().flat_map(|element| [(element, true), (element, false)])
    {
        for size in [[1, 8], [7, 264], [40, 256], [2, 2048]] {
            for (kind, more) in
                [Kind::Own, Kind::Rounded].into_iter().flat_map(|kind| [(kind, false), (kind, true)])
            {
                Case::new(kind, element, size, affine).check_whole(more);
            }
        }
    }
}
