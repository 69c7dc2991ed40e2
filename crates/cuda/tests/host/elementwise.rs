//! Functions, arithmetic and their gradients against the engine's operations in float64.

use crate::compare::near;
use crate::program::{Arg, launch, there_is_a_compiler};
use crate::values::{SIZES, decode, encode, random, room};
use phalanx_cuda::{Element, Walk, Work};
use phalanx_tensor::{Device, Tensor};

/// Roundings of float32 that a function may be off by: those of the library, and the handful of a gradient's formula.
const STEPS: f64 = 12.0;

/// A kernel, the engine's operation, the kernel's two constants for value and gradient, and where its arguments lie.
struct Function {
    kernel: &'static str,
    engine: fn(&Tensor) -> Tensor,
    constants: [[f64; 2]; 2],
    range: [f64; 2],
    keeps: Kept,
}

enum Kept {
    Nothing,
    Input,
    Output,
}

const POWER: f64 = 2.5;

#[rustfmt::skip]
const FUNCTIONS: [Function; 18] = [
    Function { kernel: "negative", engine: |x| x.neg(), constants: [[0.0; 2]; 2], range: [-3.0, 3.0], keeps: Kept::Nothing },
    Function { kernel: "exponential", engine: |x| x.exp(), constants: [[0.0; 2]; 2], range: [-5.0, 5.0], keeps: Kept::Output },
    Function { kernel: "logarithm", engine: |x| x.ln(), constants: [[0.0; 2]; 2], range: [0.1, 9.0], keeps: Kept::Input },
    Function { kernel: "root", engine: |x| x.sqrt(), constants: [[0.0; 2]; 2], range: [0.1, 9.0], keeps: Kept::Output },
    Function { kernel: "hyperbolic_tangent", engine: |x| x.tanh(), constants: [[0.0; 2]; 2], range: [-3.0, 3.0], keeps: Kept::Output },
    Function { kernel: "sigmoid", engine: |x| x.sigmoid(), constants: [[0.0; 2]; 2], range: [-5.0, 5.0], keeps: Kept::Output },
    Function { kernel: "relu", engine: |x| x.relu(), constants: [[0.0; 2]; 2], range: [-3.0, 3.0], keeps: Kept::Output },
    Function { kernel: "gelu", engine: |x| x.gelu(), constants: [[0.0; 2]; 2], range: [-3.0, 3.0], keeps: Kept::Input },
    Function { kernel: "gelu_tanh", engine: |x| x.gelu_tanh(), constants: [[0.0; 2]; 2], range: [-3.0, 3.0], keeps: Kept::Input },
    Function { kernel: "sine", engine: |x| x.sin(), constants: [[0.0; 2]; 2], range: [-7.0, 7.0], keeps: Kept::Input },
    Function { kernel: "cosine", engine: |x| x.cos(), constants: [[0.0; 2]; 2], range: [-7.0, 7.0], keeps: Kept::Input },
    Function { kernel: "absolute", engine: |x| x.abs(), constants: [[0.0; 2]; 2], range: [-3.0, 3.0], keeps: Kept::Input },
    Function { kernel: "square", engine: |x| x.square(), constants: [[0.0; 2]; 2], range: [-3.0, 3.0], keeps: Kept::Input },
    Function { kernel: "power", engine: |x| x.powf(POWER), constants: [[POWER, 0.0], [POWER, POWER - 1.0]], range: [0.1, 9.0], keeps: Kept::Input },
    Function { kernel: "power", engine: |x| x.powf(0.0), constants: [[0.0, 0.0], [0.0, -1.0]], range: [-1.0, 1.0], keeps: Kept::Input },
    Function { kernel: "over", engine: |x| x / 3.0, constants: [[3.0, 0.0]; 2], range: [-3.0, 3.0], keeps: Kept::Nothing },
    Function { kernel: "clamp", engine: |x| x.clamp(-0.5, 1.0), constants: [[-0.5, 1.0]; 2], range: [-3.0, 3.0], keeps: Kept::Input },
    Function { kernel: "affine", engine: |x| x.affine(0.75, -2.0), constants: [[0.75, -2.0]; 2], range: [-3.0, 3.0], keeps: Kept::Nothing },
];

/// A function's values at `x`, and the gradient where the output's is `grad`, in float64.
fn reference(f: fn(&Tensor) -> Tensor, x: &[f64], grad: &[f64]) -> [Vec<f64>; 2] {
    let device = Device::cpu(1);
    let x = Tensor::from_slice(&device, x, [x.len()]).requires_grad();
    let y = f(&x);
    let sum = (&y * Tensor::from_slice(&device, grad, [grad.len()])).sum_all();
    [y.detach().to_vec(), sum.backward().get(&x).unwrap().to_vec()]
}

fn value(element: Element, f: &Function, x: &[f64]) -> Vec<u8> {
    let mut out = room(element, x.len());
    let [a, b] = f.constants[0].map(|c| c as f32);
    launch(
        f.kernel,
        element,
        Work::Elements(x.len() as u64),
        &mut [
            Arg::In(&encode(element, x)),
            Arg::Out(&mut out),
            Arg::Int(x.len() as i64),
            Arg::Float(a),
            Arg::Float(b),
        ],
    );
    out
}

fn gradient(element: Element, f: &Function, kept: &[u8], grad: &[f64]) -> Vec<f64> {
    let mut out = room(element, grad.len());
    let [a, b] = f.constants[1].map(|c| c as f32);
    launch(
        &format!("{}_gradient", f.kernel),
        element,
        Work::Elements(grad.len() as u64),
        &mut [
            if matches!(f.keeps, Kept::Nothing) { Arg::Null } else { Arg::In(kept) },
            Arg::In(&encode(element, grad)),
            Arg::Out(&mut out),
            Arg::Int(grad.len() as i64),
            Arg::Float(a),
            Arg::Float(b),
        ],
    );
    decode(element, &out)
}

fn check(element: Element, f: &Function, x: &[f64], grad: &[f64]) {
    let [want, want_grad] = reference(f.engine, x, grad);
    near(f.kernel, element, &decode(element, &value(element, f, x)), &want, 1.0, STEPS);
    // An output that was kept is a rounded one; the gradient's own error is what is looked at here.
    let kept = if matches!(f.keeps, Kept::Output) { encode(element, &want) } else { encode(element, x) };
    let slope = want_grad.iter().fold(1.0, |a: f64, &g| if g.is_finite() { a.max(g.abs()) } else { a });
    let steps = match (&f.keeps, element) {
        (Kept::Output, Element::Bf16) => STEPS + (1 << 17) as f64,
        (Kept::Output, Element::F16) => STEPS + (1 << 14) as f64,
        _ => STEPS,
    };
    near(
        &format!("{}_gradient", f.kernel),
        element,
        &gradient(element, f, &kept, grad),
        &want_grad,
        slope,
        steps,
    );
}

#[test]
fn functions_and_their_gradients_are_those_of_the_engine() {
    if !there_is_a_compiler() {
        return;
    }
    for element in Element::ALL {
        for f in &FUNCTIONS {
            for n in SIZES.into_iter().filter(|&n| n > 0) {
                let x = random(element, n, f.range[0], f.range[1], 1);
                check(element, f, &x, &random(element, n, -1.0, 1.0, 2));
            }
        }
    }
}

#[test]
fn what_is_no_number_or_on_an_edge_goes_where_the_engine_puts_it() {
    if !there_is_a_compiler() {
        return;
    }
    let x = [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, 0.0, -0.0, 1.0, -1.0];
    let grad = [1.0, 1.0, 1.0, 1.0, 1.0, f64::NAN, 2.0];
    for element in Element::ALL {
        for f in &FUNCTIONS {
            check(element, f, &x, &grad);
        }
    }
}

#[test]
fn conversions_are_those_of_the_types_bit_by_bit() {
    if !there_is_a_compiler() {
        return;
    }
    let over = &FUNCTIONS[0];
    for element in [Element::Bf16, Element::F16] {
        let bits: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_ne_bytes).collect();
        let x = decode(element, &bits);
        let want: Vec<f64> = x.iter().map(|x| -x).collect();
        let got = value(element, over, &x);
        let same =
            |(got, want): (f64, f64)| got.to_bits() == want.to_bits() || (got.is_nan() && want.is_nan());
        assert!(decode(element, &got).into_iter().zip(want).all(same), "{element:?}");
    }
}

type Engine = fn(&Tensor, &Tensor) -> Tensor;

const ARITHMETIC: [(&str, Engine); 6] = [
    ("sum", |a, b| a + b),
    ("difference", |a, b| a - b),
    ("product", |a, b| a * b),
    ("quotient", |a, b| a / b),
    ("maximum", |a, b| a.maximum(b)),
    ("minimum", |a, b| a.minimum(b)),
];

/// Numbers of which some are equal, some are none, and none is near zero but zero itself.
fn operands(element: Element, n: usize, stream: u64) -> Vec<f64> {
    let special = [f64::NAN, 0.0, -0.0, 1.0, f64::INFINITY];
    let mut values = random(element, n, 0.5, 2.0, stream);
    for (i, value) in values.iter_mut().enumerate() {
        match (i + stream as usize) % 11 {
            k @ 0..5 => *value = special[k],
            5 => *value = -*value,
            _ => {}
        }
    }
    values
}

#[test]
fn arithmetic_is_that_of_the_engine() {
    if !there_is_a_compiler() {
        return;
    }
    let device = Device::cpu(1);
    for element in Element::ALL {
        for n in SIZES {
            let (a, b) = (operands(element, n, 3), operands(element, n, 5));
            for (name, engine) in ARITHMETIC {
                let mut out = room(element, n);
                launch(
                    name,
                    element,
                    Work::Elements(n as u64),
                    &mut [
                        Arg::In(&encode(element, &a)),
                        Arg::In(&encode(element, &b)),
                        Arg::Out(&mut out),
                        Arg::Int(n as i64),
                    ],
                );
                let want =
                    engine(&Tensor::from_slice(&device, &a, [n]), &Tensor::from_slice(&device, &b, [n]));
                near(name, element, &decode(element, &out), &want.to_vec(), 0.0, 1.0);
            }
        }
    }
}

#[test]
fn what_is_in_float_plus_what_is_in_16_bits_is_rounded_once() {
    if !there_is_a_compiler() {
        return;
    }
    for element in Element::ALL {
        for n in SIZES {
            let (a, b) = (operands(Element::F32, n, 3), operands(element, n, 5));
            let mut out = room(Element::F32, n);
            let mut args = [
                Arg::In(&encode(Element::F32, &a)),
                Arg::In(&encode(element, &b)),
                Arg::Out(&mut out),
                Arg::Int(n as i64),
            ];
            launch("sum_in_float", element, Work::Elements(n as u64), &mut args);
            let want: Vec<f64> = a.iter().zip(&b).map(|(a, b)| f64::from(*a as f32 + *b as f32)).collect();
            near("sum_in_float", Element::F32, &decode(Element::F32, &out), &want, 0.0, 0.0);
        }
    }
}

type Dims = &'static [usize];

/// Shapes of two tensors, their steps along the dimensions of the result, and its shape.
const BROADCASTS: [([Dims; 2], [Dims; 2], Dims); 8] = [
    // Neighbours that go together.
    ([&[6, 80], &[80]], [&[80, 1], &[0, 1]], &[6, 80]),
    ([&[3, 1, 16], &[5, 1]], [&[16, 0, 1], &[0, 1, 0]], &[3, 5, 16]),
    // One element of one of them goes to all neighbours.
    ([&[4, 3, 1], &[3, 8]], [&[3, 1, 0], &[0, 8, 1]], &[4, 3, 8]),
    ([&[5, 7], &[7]], [&[7, 1], &[0, 1]], &[5, 7]),
    ([&[5, 1], &[1, 7]], [&[1, 0], &[0, 1]], &[5, 7]),
    ([&[], &[3, 5, 2]], [&[0, 0, 0], &[10, 2, 1]], &[3, 5, 2]),
    (
        [&[2, 1, 3, 1, 5, 1], &[7, 1, 3, 1, 1]],
        [&[15, 0, 5, 0, 1, 0], &[0, 3, 0, 1, 0, 0]],
        &[2, 7, 3, 3, 5, 1],
    ),
    ([&[0, 4], &[4]], [&[4, 1], &[0, 1]], &[0, 4]),
];

#[test]
fn broadcast_arithmetic_is_that_of_the_engine() {
    if !there_is_a_compiler() {
        return;
    }
    let device = Device::cpu(1);
    for element in Element::ALL {
        for (shapes, steps, out_shape) in BROADCASTS {
            let [a, b] = [0, 1].map(|i| operands(element, shapes[i].iter().product(), 3 + i as u64));
            let n: usize = out_shape.iter().product();
            for (name, engine) in ARITHMETIC {
                let mut out = room(element, n);
                launch(
                    &format!("{name}_views"),
                    element,
                    Work::Elements(n as u64),
                    &mut [
                        Arg::In(&encode(element, &a)),
                        Arg::In(&encode(element, &b)),
                        Arg::Out(&mut out),
                        Arg::Struct(Walk::new(out_shape, steps).as_bytes().to_vec()),
                        Arg::Int(n as i64),
                    ],
                );
                let tensors = [(&a, shapes[0]), (&b, shapes[1])]
                    .map(|(values, shape)| Tensor::from_slice(&device, values, shape));
                let want = engine(&tensors[0], &tensors[1]);
                assert_eq!(want.dims(), out_shape);
                near(name, element, &decode(element, &out), &want.to_vec(), 0.0, 1.0);
            }
        }
    }
}

#[test]
fn a_winner_takes_the_gradient_and_a_tie_halves_it() {
    if !there_is_a_compiler() {
        return;
    }
    let device = Device::cpu(1);
    let n = 997;
    for element in Element::ALL {
        let (a, b, grad) =
            (operands(element, n, 3), operands(element, n, 5), random(element, n, -1.0, 1.0, 9));
        for (sign, engine) in [(1.0, ARITHMETIC[4].1), (-1.0, ARITHMETIC[5].1)] {
            let mut out = room(element, n);
            launch(
                "winner_gradient",
                element,
                Work::Elements(n as u64),
                &mut [
                    Arg::In(&encode(element, &a)),
                    Arg::In(&encode(element, &b)),
                    Arg::In(&encode(element, &grad)),
                    Arg::Out(&mut out),
                    Arg::Struct(Walk::new(&[n], [&[1], &[1], &[1]]).as_bytes().to_vec()),
                    Arg::Int(n as i64),
                    Arg::Float(sign),
                ],
            );
            let mine = Tensor::from_slice(&device, &a, [n]).requires_grad();
            let other = Tensor::from_slice(&device, &b, [n]);
            let sum = (engine(&mine, &other) * Tensor::from_slice(&device, &grad, [n])).sum_all();
            let want: Vec<f64> = sum.backward().get(&mine).unwrap().to_vec();
            near("winner_gradient", element, &decode(element, &out), &want, 0.0, 1.0);
        }
    }
}

#[test]
fn a_sum_in_place_is_a_sum() {
    if !there_is_a_compiler() {
        return;
    }
    for element in Element::ALL {
        for n in SIZES {
            let (a, b) = (random(element, n, -1.0, 1.0, 3), random(element, n, -1.0, 1.0, 4));
            let mut sum = encode(element, &a);
            launch(
                "add_assign",
                element,
                Work::Elements(n as u64),
                &mut [Arg::Out(&mut sum), Arg::In(&encode(element, &b)), Arg::Int(n as i64)],
            );
            let want: Vec<f64> = a.iter().zip(&b).map(|(a, b)| a + b).collect();
            near("add_assign", element, &decode(element, &sum), &want, 0.0, 1.0);
        }
    }
}
