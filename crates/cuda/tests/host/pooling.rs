//! Pooling against the engine's in float64, whose images are (N, C, H, W) where the kernels' are (N, H, W, C).

use crate::compare::near;
use crate::program::{Arg, launch, there_is_a_compiler};
use crate::values::{decode, encode, random, room};
use phalanx_cuda::{Element, Window, Work};
use phalanx_tensor::{CountPadding, Device, PoolOptions, Tensor};

/// Roundings of float32 of a mean of a window.
const STEPS: f64 = 12.0;
/// Images.
const N: usize = 2;
/// Channels: such as are taken one by one, and such as are taken together.
const CHANNELS: [usize; 2] = [3, 16];

struct Case {
    element: Element,
    window: Window,
    options: PoolOptions,
    device: Device,
}

impl Case {
    fn all() -> impl Iterator<Item = Case> {
        let cases = [
            ([8, 6], [2, 2], [2, 2], [0, 0]),
            ([7, 9], [3, 3], [2, 2], [1, 1]),
            ([5, 5], [3, 2], [1, 1], [1, 0]),
            ([9, 4], [2, 3], [4, 3], [0, 1]),
            ([6, 7], [6, 7], [1, 1], [0, 0]),
            ([1, 1], [1, 1], [1, 1], [0, 0]),
        ];
        let kinds = Element::ALL.into_iter().flat_map(|element| CHANNELS.map(|channels| (element, channels)));
        kinds.flat_map(move |(element, channels)| {
            cases.map(|(input, kernel, stride, padding)| {
                let output = [0, 1].map(|d| (input[d] + 2 * padding[d] - kernel[d]) / stride[d] + 1);
                let window = Window { channels, input, output, kernel, stride, padding };
                Case {
                    element,
                    window,
                    options: PoolOptions { kernel, stride, padding },
                    device: Device::cpu(1),
                }
            })
        })
    }

    /// Channels last, as the kernels want it.
    fn images(&self, values: &[f64], [h, w]: [usize; 2]) -> Tensor {
        Tensor::from_slice(&self.device, values, [N, h, w, self.window.channels]).permute(&[0, 3, 1, 2])
    }

    /// What the engine makes of `x`, and the gradient where the output's is `grad`; both with channels last.
    fn reference(&self, x: &[f64], grad: &[f64], pool: impl Fn(&Tensor) -> Tensor) -> [Vec<f64>; 2] {
        let x = self.images(x, self.window.input).contiguous().requires_grad();
        let y = pool(&x);
        assert_eq!(y.dims()[2..], self.window.output);
        let grads = (&y * self.images(grad, self.window.output)).sum_all().backward();
        [y.detach(), grads.get(&x).unwrap().clone()].map(|t| t.permute(&[0, 2, 3, 1]).to_vec())
    }

    fn counts(&self) -> [usize; 2] {
        [self.window.input, self.window.output].map(|[h, w]| N * h * w * self.window.channels)
    }

    fn launch(&self, kernel: &str, n: usize, mut args: Vec<Arg<'_>>, whole: Option<i64>) {
        args.push(Arg::Struct(self.window.to_bytes().to_vec()));
        args.extend(whole.map(Arg::Int));
        args.push(Arg::Int(n as i64));
        launch(kernel, self.element, Work::Elements(n as u64), &mut args);
    }
}

/// Values with ties, of which some are none if asked for.
fn values(element: Element, n: usize, with_nan: bool) -> Vec<f64> {
    let mut x: Vec<f64> = random(element, n, -3.0, 3.0, 1).iter().map(|x| x.round()).collect();
    if with_nan {
        x.iter_mut().skip(1).step_by(13).for_each(|x| *x = f64::NAN);
    }
    x
}

#[test]
fn the_largest_of_windows_and_their_gradients_are_those_of_the_engine() {
    if !there_is_a_compiler() {
        return;
    }
    for case in Case::all() {
        largest(&case, false);
        largest(&case, true);
    }
}

fn largest(case: &Case, with_nan: bool) {
    let (element, [inputs, outputs]) = (case.element, case.counts());
    let (x, grad) = (values(element, inputs, with_nan), random(element, outputs, -1.0, 1.0, 2));
    let [want, want_grad] = case.reference(&x, &grad, |x| x.max_pool2d(case.options));
    let (mut out, mut position) = (room(element, outputs), vec![0xa5; outputs]);
    let x = encode(element, &x);
    case.launch("max_pool", outputs, vec![Arg::In(&x), Arg::Out(&mut out), Arg::Out(&mut position)], None);
    near("max_pool", element, &decode(element, &out), &want, 0.0, 0.0);
    let (mut out, grad) = (room(element, inputs), encode(element, &grad));
    case.launch(
        "max_pool_gradient",
        inputs,
        vec![Arg::In(&position), Arg::In(&grad), Arg::Out(&mut out)],
        None,
    );
    near("max_pool_gradient", element, &decode(element, &out), &want_grad, 1.0, STEPS);
}

#[test]
fn means_of_windows_and_their_gradients_are_those_of_the_engine() {
    if !there_is_a_compiler() {
        return;
    }
    for case in Case::all() {
        for (whole, padding) in [(1, CountPadding::Yes), (0, CountPadding::No)] {
            let (element, [inputs, outputs]) = (case.element, case.counts());
            let (x, grad) = (random(element, inputs, -1.0, 1.0, 1), random(element, outputs, -1.0, 1.0, 2));
            let [want, want_grad] = case.reference(&x, &grad, |x| x.avg_pool2d(case.options, padding));
            let (mut out, x) = (room(element, outputs), encode(element, &x));
            case.launch("average_pool", outputs, vec![Arg::In(&x), Arg::Out(&mut out)], Some(whole));
            near("average_pool", element, &decode(element, &out), &want, 1.0, STEPS);
            let (mut out, grad) = (room(element, inputs), encode(element, &grad));
            case.launch(
                "average_pool_gradient",
                inputs,
                vec![Arg::In(&grad), Arg::Out(&mut out)],
                Some(whole),
            );
            near("average_pool_gradient", element, &decode(element, &out), &want_grad, 1.0, STEPS);
        }
    }
}
