//! Losses and their gradients against the engine's in float64.

use crate::compare::near;
use crate::program::{Arg, launch, there_is_a_compiler};
use crate::values::{decode, encode, random, room};
use phalanx_cuda::{Element, Work};
use phalanx_tensor::{DType, Device, Tensor};

/// Roundings of float32: exponentials, logarithms and sums of some hundred.
const STEPS: f64 = 40.0;
/// The gradient of the loss.
const GRAD: f64 = 0.5;
/// Elements of a piece.
const PIECE: usize = 100;

/// Rows and widths.
const SIZES: [[usize; 2]; 4] = [[1, 2], [17, 10], [5, 1000], [70, 33]];

struct Batch {
    device: Device,
    element: Element,
    size: [usize; 2],
    x: Vec<f64>,
    labels: Vec<i64>,
}

impl Batch {
    fn new(element: Element, size: [usize; 2]) -> Batch {
        let labels = (0..size[0]).map(|row| (row * 7 % size[1]) as i64).collect();
        Batch {
            device: Device::cpu(1),
            element,
            size,
            x: random(element, size[0] * size[1], -3.0, 3.0, 1),
            labels,
        }
    }

    fn all() -> impl Iterator<Item = Batch> {
        Element::ALL.into_iter().flat_map(|element| SIZES.map(|size| Batch::new(element, size)))
    }

    fn work(&self) -> Work {
        Work::Rows { rows: self.size[0] as u64, width: self.size[1] as u64 }
    }

    fn tensor(&self, values: &[f64]) -> Tensor {
        Tensor::from_slice(&self.device, values, self.size)
    }

    fn label_tensor(&self) -> Tensor {
        Tensor::from_slice(&self.device, &self.labels, [self.size[0]])
    }

    fn label_bytes(&self) -> &[u8] {
        bytemuck::cast_slice(&self.labels)
    }

    fn rows_and_width(&self) -> [Arg<'static>; 2] {
        [Arg::Int(self.size[0] as i64), Arg::Int(self.size[1] as i64)]
    }

    /// What `sum_parts` makes of losses.
    fn mean(&self, losses: &[u8], count: usize) -> Vec<f64> {
        let mut out = room(self.element, 1);
        let parts = losses.len() / 4;
        launch(
            "sum_parts",
            self.element,
            Work::Rows { rows: 1, width: parts as u64 },
            &mut [
                Arg::In(losses),
                Arg::Out(&mut out),
                Arg::Int(1),
                Arg::Int(parts as i64),
                Arg::Float((1.0 / count as f64) as f32),
            ],
        );
        decode(self.element, &out)
    }

    fn check(&self, what: &str, got: &[f64], want: &[f64], scale: f64) {
        near(what, self.element, got, want, scale, STEPS);
    }
}

/// The value of a loss of `x`, and the gradient of GRAD times it.
fn reference(x: &Tensor, loss: impl Fn(&Tensor) -> Tensor) -> [Vec<f64>; 2] {
    let x = x.clone().requires_grad();
    let value = loss(&x);
    let grads = (&value * GRAD).backward();
    [vec![value.item()], grads.get(&x).unwrap().to_vec()]
}

#[test]
fn targets_of_labels_are_those_of_the_engine() {
    if !there_is_a_compiler() {
        return;
    }
    for batch in Batch::all() {
        let [rows, width] = batch.size;
        // All classes, and a part that begins in their midst.
        for [start, here] in [[0, width], [width / 2, width - width / 2]] {
            let targets = |labels: &[i64]| {
                let (mut out, mut bad) = (room(batch.element, rows * here), [0; 4]);
                let mut args = vec![
                    Arg::In(bytemuck::cast_slice(labels)),
                    Arg::Out(&mut out),
                    Arg::Out(&mut bad),
                    Arg::Int(rows as i64),
                    Arg::Int(here as i64),
                    Arg::Int(start as i64),
                    Arg::Int(width as i64),
                ];
                launch("one_hot", batch.element, Work::Elements((rows * here) as u64), &mut args);
                (decode(batch.element, &out), i32::from_ne_bytes(bad))
            };
            let want = batch.label_tensor().one_hot(start..start + here, width, DType::F64).to_vec::<f64>();
            assert_eq!(targets(&batch.labels), (want, 0), "{:?}: {start} of {:?}", batch.element, batch.size);
            for wrong in [-1, width as i64, i64::MAX, i64::MIN] {
                let (out, bad) = targets(&[&[wrong], &batch.labels[1..]].concat());
                let is_told = out.iter().enumerate().all(|(i, x)| x.is_nan() == (i < here));
                assert!(is_told && bad == 1, "{wrong} of {width}: {out:?}");
            }
        }
    }
}

#[test]
fn negative_log_likelihood_is_that_of_the_engine() {
    if !there_is_a_compiler() {
        return;
    }
    for batch in Batch::all() {
        let (element, [rows, width]) = (batch.element, batch.size);
        let [want, want_grad] = reference(&batch.tensor(&batch.x), |x| x.nll_loss(&batch.label_tensor()));
        let (mut losses, mut bad) = (room(Element::F32, rows), [0; 4]);
        let mut args =
            vec![Arg::In(&[]), Arg::In(batch.label_bytes()), Arg::Out(&mut losses), Arg::Out(&mut bad)];
        let x = encode(element, &batch.x);
        args[0] = Arg::In(&x);
        args.extend(batch.rows_and_width());
        launch("nll", element, Work::Elements(rows as u64), &mut args);
        batch.check("nll", &batch.mean(&losses, rows), &want, 3.0);
        assert_eq!(bad, [0; 4]);
        let mut out = room(element, rows * width);
        let grad = encode(element, &[GRAD]);
        let mut args = vec![Arg::In(batch.label_bytes()), Arg::In(&grad), Arg::Out(&mut out)];
        args.extend(batch.rows_and_width());
        args.push(Arg::Float((1.0 / rows as f64) as f32));
        launch("nll_gradient", element, Work::Elements((rows * width) as u64), &mut args);
        batch.check("nll_gradient", &decode(element, &out), &want_grad, 0.0);
    }
}

#[test]
fn places_of_labels_are_those_of_the_engine() {
    if !there_is_a_compiler() {
        return;
    }
    for batch in Batch::all() {
        let (element, [rows, width]) = (batch.element, batch.size);
        // Some scores are equal, and the last row's are none.
        let mut scores: Vec<f64> = batch.x.iter().map(|x| (x * 2.0).round()).collect();
        scores[(rows - 1) * width..].fill(f64::NAN);
        let x = encode(element, &scores);
        let places = |labels: &[i64]| {
            let mut out = room(Element::F32, rows);
            let labels = bytemuck::cast_slice(labels);
            let mut args = vec![Arg::In(&x), Arg::In(labels), Arg::Out(&mut out)];
            args.extend(batch.rows_and_width());
            launch("label_places", element, batch.work(), &mut args);
            decode(Element::F32, &out)
        };
        let want = batch.tensor(&scores).label_places(&batch.label_tensor()).to_vec::<f32>();
        let want: Vec<f64> = want.into_iter().map(f64::from).collect();
        assert_eq!(places(&batch.labels), want, "{element:?}: {:?}", batch.size);
        assert_eq!(want[rows - 1], -1.0);
        for wrong in [-1, width as i64, i64::MAX, i64::MIN] {
            assert_eq!(places(&[&[wrong], &batch.labels[1..]].concat())[0], -1.0, "{wrong} of {width}");
        }
    }
}

#[test]
fn cross_entropy_is_that_of_the_engine() {
    if !there_is_a_compiler() {
        return;
    }
    for batch in Batch::all() {
        for smoothing in [0.0, 0.1] {
            let (element, [rows, width]) = (batch.element, batch.size);
            let tensor = batch.tensor(&batch.x);
            let [want, want_grad] = reference(&tensor, |x| x.cross_entropy(&batch.label_tensor(), smoothing));
            let (x, labels) = (encode(element, &batch.x), batch.label_bytes());
            let [mut shifts, mut losses] = [room(Element::F32, 2 * rows), room(Element::F32, rows)];
            let mut bad = [0; 4];
            let mut args = vec![Arg::In(&x), Arg::In(labels), Arg::Out(&mut shifts), Arg::Out(&mut losses)];
            args.push(Arg::Out(&mut bad));
            args.extend(batch.rows_and_width());
            args.push(Arg::Float(smoothing as f32));
            launch("cross_entropy", element, batch.work(), &mut args);
            assert_eq!(bad, [0; 4]);
            batch.check("cross_entropy", &batch.mean(&losses, rows), &want, 10.0);
            // The same is taken from each of a row.
            let log = tensor.log_softmax(1).to_vec::<f64>();
            let want: Vec<f64> = (0..rows).map(|row| batch.x[row * width] - log[row * width]).collect();
            let taken: Vec<f64> =
                decode(Element::F32, &shifts).chunks(2).map(|pair| pair[0] + pair[1]).collect();
            near("what is taken", Element::F32, &taken, &want, 10.0, STEPS);

            let mut out = room(element, rows * width);
            let grad = encode(Element::F32, &[GRAD]);
            let mut args = vec![Arg::In(&x), Arg::In(&shifts), Arg::In(labels), Arg::In(&grad)];
            args.push(Arg::Out(&mut out));
            args.extend(batch.rows_and_width());
            args.extend([Arg::Float(smoothing as f32), Arg::Float((1.0 / rows as f64) as f32)]);
            launch("cross_entropy_gradient", element, Work::Elements((rows * width) as u64), &mut args);
            batch.check("cross_entropy_gradient", &decode(element, &out), &want_grad, GRAD / rows as f64);
        }
    }
}

/// Beside logits of 1e8 the logarithm of two is no more than a rounding.
#[test]
fn of_two_that_are_as_likely_each_has_a_half_however_large_they_are() {
    if !there_is_a_compiler() {
        return;
    }
    let x = encode(Element::F32, &[1e8, 1e8, -1e8, -1e8]);
    let labels = [0i64, 1];
    let [mut shifts, mut losses, mut bad] = [room(Element::F32, 4), room(Element::F32, 2), vec![0; 4]];
    let mut args = vec![Arg::In(&x), Arg::In(bytemuck::cast_slice(&labels)), Arg::Out(&mut shifts)];
    args.extend([Arg::Out(&mut losses), Arg::Out(&mut bad), Arg::Int(2), Arg::Int(2), Arg::Float(0.1)]);
    launch("cross_entropy", Element::F32, Work::Rows { rows: 2, width: 2 }, &mut args);
    let ln_2 = std::f64::consts::LN_2;
    near("losses", Element::F32, &decode(Element::F32, &losses), &[ln_2; 2], 1.0, STEPS);
    let (mut out, grad) = (room(Element::F32, 4), encode(Element::F32, &[1.0]));
    let mut args = vec![Arg::In(&x), Arg::In(&shifts), Arg::In(bytemuck::cast_slice(&labels))];
    args.extend([
        Arg::In(&grad),
        Arg::Out(&mut out),
        Arg::Int(2),
        Arg::Int(2),
        Arg::Float(0.0),
        Arg::Float(1.0),
    ]);
    launch("cross_entropy_gradient", Element::F32, Work::Elements(4), &mut args);
    let want = [-0.5, 0.5, 0.5, -0.5];
    near("gradients", Element::F32, &decode(Element::F32, &out), &want, 1.0, STEPS);
    let mut out = room(Element::F32, 4);
    let mut args = vec![Arg::In(&x), Arg::Out(&mut out), Arg::Int(2), Arg::Int(2)];
    launch("log_softmax", Element::F32, Work::Rows { rows: 2, width: 2 }, &mut args);
    near("log_softmax", Element::F32, &decode(Element::F32, &out), &[-ln_2; 4], 1.0, STEPS);
}

#[test]
fn labels_that_are_no_classes_are_told_and_read_nothing() {
    if !there_is_a_compiler() {
        return;
    }
    for (wrong, kernel) in
        [-1, 3, i64::MAX, i64::MIN].into_iter().flat_map(|w| [(w, "nll"), (w, "cross_entropy")])
    {
        let labels = [1, wrong, 2];
        let x = encode(Element::F32, &[0.0; 9]);
        let [mut shifts, mut losses] = [room(Element::F32, 6), room(Element::F32, 3)];
        let mut bad = [0; 4];
        let mut args = vec![Arg::In(&x), Arg::In(bytemuck::cast_slice(&labels))];
        let rows = kernel == "cross_entropy";
        if rows {
            args.push(Arg::Out(&mut shifts));
        }
        args.extend([Arg::Out(&mut losses), Arg::Out(&mut bad), Arg::Int(3), Arg::Int(3)]);
        if rows {
            args.push(Arg::Float(0.0));
        }
        let work = if rows { Work::Rows { rows: 3, width: 3 } } else { Work::Elements(3) };
        launch(kernel, Element::F32, work, &mut args);
        let nan: Vec<bool> = decode(Element::F32, &losses).iter().map(|x| x.is_nan()).collect();
        assert_eq!((nan, i32::from_ne_bytes(bad)), (vec![false, true, false], 1), "{kernel}, {wrong}");
    }
}

#[test]
fn losses_of_pairs_are_those_of_the_engine() {
    if !there_is_a_compiler() {
        return;
    }
    let kernels = [("squared_error", 2.0), ("binary_cross_entropy", 1.0)];
    for ((kernel, factor), batch) in
        kernels.into_iter().flat_map(|k| Batch::all().map(move |batch| (k, batch)))
    {
        let (element, n) = (batch.element, batch.x.len());
        let t = random(element, n, 0.0, 1.0, 8);
        let [want, want_grad] = reference(&batch.tensor(&batch.x), |x| match kernel {
            "squared_error" => x.mse_loss(&batch.tensor(&t)),
            _ => x.bce_with_logits(&batch.tensor(&t)),
        });
        let (x, t) = (encode(element, &batch.x), encode(element, &t));
        let pieces = n.div_ceil(PIECE);
        let mut losses = room(Element::F32, pieces);
        launch(
            kernel,
            element,
            Work::Rows { rows: pieces as u64, width: PIECE as u64 },
            &mut [
                Arg::In(&x),
                Arg::In(&t),
                Arg::Out(&mut losses),
                Arg::Int(n as i64),
                Arg::Int(PIECE as i64),
            ],
        );
        batch.check(kernel, &batch.mean(&losses, n), &want, 1.0);
        let mut out = room(element, n);
        let grad = encode(element, &[GRAD]);
        launch(
            &format!("{kernel}_gradient"),
            element,
            Work::Elements(n as u64),
            &mut [
                Arg::In(&x),
                Arg::In(&t),
                Arg::In(&grad),
                Arg::Out(&mut out),
                Arg::Int(n as i64),
                Arg::Float((factor / n as f64) as f32),
            ],
        );
        batch.check(&format!("{kernel}_gradient"), &decode(element, &out), &want_grad, 1.0 / n as f64);
    }
}
