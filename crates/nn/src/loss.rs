//! Losses by name, for recipes, and those of a program's own; each is the mean over the batch.

use crate::module::Ctx;
use phalanx_tensor::{DType, Keep, Tensor};
use std::fmt;
use std::panic::Location;
use std::sync::Arc;

/// How a model's output is held against its targets.
///
/// ```
/// use phalanx_nn::Loss;
/// use phalanx_tensor::{Device, Tensor};
///
/// let device = Device::cpu(1);
/// let logits = Tensor::from_slice(&device, &[0.0f32, 0.0, 0.0, 0.0], [2, 2]);
/// let labels = Tensor::from_slice(&device, &[0i64, 1], [2]);
/// let loss = Loss::CrossEntropy { label_smoothing: 0.0 }.of(&logits, &labels);
/// assert!((loss.item() - 2f64.ln()).abs() < 1e-6);
/// ```
#[derive(Clone, Debug, PartialEq)]
pub enum Loss {
    /// Negative log likelihood of log-probabilities; targets are labels, or shares of the classes (N, C).
    Nll,
    /// Cross entropy of logits; targets are labels, or shares of the classes (N, C) as mixup makes them.
    CrossEntropy {
        /// How much of the target is spread over all classes, in [0, 1).
        label_smoothing: f64,
    },
    /// Cross entropy of logits with labels, of which some count more than others, or not at all.
    WeightedCrossEntropy(WeightedCrossEntropy),
    /// Mean squared error; targets have the shape of the output.
    Mse,
    /// Binary cross entropy of logits; targets in [0, 1] have the shape of the output.
    BceWithLogits,
    /// A program's own: see [`Loss::own`].
    Own(OwnLoss),
}

impl Loss {
    /// The loss that `f` makes of an output and its targets, a scalar. Wherever samples are shared out, among ranks, micro-batches or
    /// the batches of a step, what counts is the mean of its values by samples, so it should be a mean over its samples. Of it there is no
    /// accuracy.
    ///
    /// Where passes are recorded as graphs it is called while that is done, so what it makes of tensors alone is in all of them; and all
    /// ranks have to be given the same one.
    ///
    /// ```
    /// use phalanx_nn::Loss;
    /// use phalanx_tensor::{Device, Tensor};
    ///
    /// // What is too little costs three times as much as what is too much.
    /// let pinball = Loss::own(|output, target| {
    ///     assert_eq!(output.dims(), target.dims(), "else one is repeated");
    ///     let off = target - output;
    ///     off.gt(0.0).where_cond(&(&off * 0.75), &(&off * -0.25)).mean_all()
    /// });
    /// let device = Device::cpu(1);
    /// let [output, target] = [[1.0f32, 5.0], [2.0, 3.0]].map(|x| Tensor::from_slice(&device, &x, [2]));
    /// assert_eq!(pinball.of(&output, &target).item(), (0.75 + 0.5) / 2.0);
    /// ```
    #[track_caller]
    pub fn own(f: impl Fn(&Tensor, &Tensor) -> Tensor + Send + Sync + 'static) -> Loss {
        Loss::called("a loss".to_owned(), f)
    }

    /// The loss that is a sum over what counts, divided by how much counts: `sum` makes the first of an output and its targets, `weight`
    /// the other of the targets alone, both scalars. Wherever samples are shared out, among ranks, micro-batches or the batches of a step,
    /// it is that of one batch of all of them, as of [`Loss::WeightedCrossEntropy`], where a mean over what counts of each part is another.
    /// On a GPU each pass waits for what `weight` comes to.
    ///
    /// ```
    /// use phalanx_nn::Loss;
    /// use phalanx_tensor::{Device, Tensor};
    ///
    /// // Targets below 0 are missing.
    /// let is_there = |target: &Tensor| target.ge(0.0).cast(target.dtype());
    /// let loss = Loss::own_by_weight(
    ///     move |output, target| {
    ///         assert_eq!(output.dims(), target.dims(), "else one is repeated");
    ///         ((output - target).square() * is_there(target)).sum_all()
    ///     },
    ///     move |target| is_there(target).sum_all(),
    /// );
    /// let device = Device::cpu(1);
    /// let [output, target] = [[1.0f32, 5.0, 2.0], [2.0, -1.0, 5.0]].map(|x| Tensor::from_slice(&device, &x, [3]));
    /// assert_eq!(loss.of(&output, &target).item(), (1.0 + 9.0) / 2.0);
    /// ```
    #[track_caller]
    pub fn own_by_weight(
        sum: impl Fn(&Tensor, &Tensor) -> Tensor + Send + Sync + 'static,
        weight: impl Fn(&Tensor) -> Tensor + Send + Sync + 'static,
    ) -> Loss {
        let Loss::Own(own) = Loss::own(sum) else { unreachable!("it is one of a program's own") };
        Loss::Own(OwnLoss { weight: Some((Arc::new(weight), MeanOver::Counted)), ..own })
    }

    /// One that says what it is.
    #[track_caller]
    fn called(what: String, f: impl Fn(&Tensor, &Tensor) -> Tensor + Send + Sync + 'static) -> Loss {
        Loss::Own(OwnLoss { f: Arc::new(f), weight: None, what, made_at: Location::caller() })
    }

    /// The mean absolute error; targets have the shape of the output.
    #[track_caller]
    pub fn l1() -> Loss {
        Loss::called("l1".to_owned(), |output, target| off(output, target).abs().mean_all())
    }

    /// Huber's loss: half the square of what an output is off by, and from `delta` on a straight line of that slope, so that what is far
    /// off draws no harder; targets have the shape of the output.
    ///
    /// ```
    /// use phalanx_nn::Loss;
    /// use phalanx_tensor::{Device, Tensor};
    ///
    /// let device = Device::cpu(1);
    /// let [output, target] = [[1.0f32, 5.0], [1.5, 2.0]].map(|x| Tensor::from_slice(&device, &x, [2]));
    /// assert_eq!(Loss::huber(1.0).of(&output, &target).item(), (0.125 + 2.5) / 2.0);
    /// ```
    #[track_caller]
    pub fn huber(delta: f64) -> Loss {
        assert!(delta > 0.0, "loss: Huber's delta must be above 0, got {delta}");
        Loss::called(format!("huber({delta})"), move |output, target| {
            let off = off(output, target).abs();
            let far = off.affine(delta, -0.5 * delta * delta);
            off.lt(delta).where_cond(&(off.square() * 0.5), &far).mean_all()
        })
    }

    /// [`Loss::BceWithLogits`] where targets of 1 count so much more than those of 0: a number for all, or for each of the last dimension.
    #[track_caller]
    pub fn bce_with_positive_weights(weights: &[f32]) -> Loss {
        let is_weight = |weight: &f32| *weight >= 0.0 && weight.is_finite();
        assert!(
            weights.iter().all(is_weight),
            "loss: positive weights of {weights:?}: numbers of at least 0"
        );
        let weights = weights.to_vec();
        Loss::called(format!("bce_with_positive_weights({weights:?})"), move |output, target| {
            check_alike("loss", output, target);
            let last = output.dims().last().copied();
            assert!(
                weights.len() == 1 || last == Some(weights.len()),
                "loss: {} positive weights for outputs of shape {}: one, or one for each of the last dimension",
                weights.len(),
                output.shape()
            );
            let [output, target] = [wide(output), wide(target)];
            let weights = Tensor::constant(output.device(), &weights, [weights.len()]).cast(output.dtype());
            let positive = output.neg().softplus() * &target * weights;
            (positive + output.softplus() * target.affine(-1.0, 1.0)).mean_all()
        })
    }

    /// The loss of `output`, a scalar. Scores (N, T, C) of sequences with labels (N, T) are those of N T samples, and scores (N, C, H, W) of
    /// pixels, with as many labels, row by row, those of N H W.
    #[track_caller]
    pub fn of(&self, output: &Tensor, target: &Tensor) -> Tensor {
        if let Loss::Own(own) = self {
            return own.of(output, target);
        }
        if target.dtype() == DType::I64 && output.dims().len() > 2 {
            let [scores, labels] = Loss::rows(output, target);
            return self.of(&scores, &labels);
        }
        let labels = target.dtype() == DType::I64;
        match self {
            Loss::Nll if !labels => shared(output, target, 0.0),
            Loss::CrossEntropy { label_smoothing } if !labels => {
                shared(&output.log_softmax(1), target, *label_smoothing)
            }
            Loss::Nll => output.nll_loss(target),
            Loss::CrossEntropy { label_smoothing } => output.cross_entropy(target, *label_smoothing),
            Loss::WeightedCrossEntropy(of_some) => of_some.of(output, target),
            Loss::Mse => output.mse_loss(target),
            Loss::BceWithLogits => output.bce_with_logits(target),
            Loss::Own(own) => own.of(output, target),
        }
    }

    /// Scores of class labels, a row a label, as [`Loss::of`] takes them of sequences and of pixels.
    #[track_caller]
    pub fn rows(scores: &Tensor, labels: &Tensor) -> [Tensor; 2] {
        let (apart, count) = (scores.dims(), labels.count());
        let rows = match *apart {
            [_, _] => scores.clone(),
            [n, t, classes] if n * t == count => scores.reshape([count, classes]),
            [n, classes, h, w] if n * h * w == count => {
                scores.permute(&[0, 2, 3, 1]).reshape([count, classes])
            }
            _ => panic!(
                "loss: scores of shape {} with labels of {}: (N, C) with (N), (N, T, C) with (N, T), or (N, C, H, W) with (N, H W) would do",
                scores.shape(),
                labels.shape()
            ),
        };
        [rows, labels.reshape([count])]
    }

    /// As [`Loss::of`], of the output that a pass came to, which may have the scores of some classes alone
    /// ([`Ctx::with_classes_in_parts`]): then only the cross entropy with labels can be taken.
    #[track_caller]
    pub fn of_pass(&self, output: &Tensor, target: &Tensor, ctx: &Ctx) -> Tensor {
        let Some(in_parts) = ctx.classes_in_parts() else { return self.of(output, target) };
        let Loss::CrossEntropy { label_smoothing } = self else {
            panic!("loss: {self:?} of the scores of some classes alone: the cross entropy can be taken");
        };
        let (labels, classes) = (target.count(), output.dims()[output.dims().len() - 1]);
        assert!(
            target.dtype() == DType::I64 && output.count() == labels * classes,
            "loss: scores of shape {} of some classes alone, with targets of shape {}: a label a row would do",
            output.shape(),
            target.shape()
        );
        in_parts(&output.reshape([labels, classes]), &target.reshape([labels]), *label_smoothing)
    }

    /// Whether targets are class labels, so that accuracy means something.
    pub fn has_labels(&self) -> bool {
        matches!(self, Loss::Nll | Loss::CrossEntropy { .. } | Loss::WeightedCrossEntropy(_))
    }

    /// The label of what doesn't count, if there is one.
    pub fn ignored(&self) -> Option<i64> {
        match self {
            Loss::WeightedCrossEntropy(of_some) => of_some.ignored,
            _ => None,
        }
    }

    /// Whether it is how unlikely the labels that count were told to be, all alike: the mean of -ln p, of which a perplexity can be told.
    pub fn is_likelihood(&self) -> bool {
        match self {
            Loss::Nll => true,
            Loss::CrossEntropy { label_smoothing } => *label_smoothing == 0.0,
            Loss::WeightedCrossEntropy(of_some) => {
                of_some.label_smoothing == 0.0 && of_some.weights.is_empty()
            }
            Loss::Mse | Loss::BceWithLogits | Loss::Own(_) => false,
        }
    }

    /// Whether the mean is by what labels count, which isn't the same of all of them.
    pub fn weighs(&self) -> bool {
        match self {
            Loss::WeightedCrossEntropy(of_some) => of_some.mean == MeanOver::Counted,
            Loss::Own(own) => own.weighs().is_some(),
            _ => false,
        }
    }

    /// What targets of a [`Loss::own_by_weight`] count in the mean, by their number: a scalar. None of all others, of which labels tell
    /// ([`Loss::counts`]).
    #[track_caller]
    pub fn weight(&self, target: &Tensor) -> Option<Tensor> {
        let Loss::Own(own) = self else { return None };
        let weight = own.scalar("the weight", own.weighs()?(target));
        Some(weight * (1.0 / target.count().max(1) as f64))
    }

    /// What these labels count together in the mean.
    ///
    /// A batch that is cut in parts has the mean of the parts' [`Loss::over_all`], each by its share of the labels, divided by the share
    /// that counts of all of them: this, summed over the parts, by the number of labels.
    pub fn counts(&self, labels: &[i64]) -> f64 {
        match self {
            Loss::WeightedCrossEntropy(of_some) if self.weighs() => of_some.counts(labels),
            _ => labels.len() as f64,
        }
    }

    /// The same as a mean over all labels, whatever they count: see [`MeanOver::All`].
    pub fn over_all(&self) -> Loss {
        match self {
            Loss::WeightedCrossEntropy(of_some) => {
                Loss::WeightedCrossEntropy(WeightedCrossEntropy { mean: MeanOver::All, ..of_some.clone() })
            }
            Loss::Own(own) => {
                let weight = own.weight.clone().map(|(weight, _)| (weight, MeanOver::All));
                Loss::Own(OwnLoss { weight, ..own.clone() })
            }
            _ => self.clone(),
        }
    }
}

/// What makes a loss of an output and its targets.
type LossFn = dyn Fn(&Tensor, &Tensor) -> Tensor + Send + Sync;

/// What says how much targets count.
type WeightFn = dyn Fn(&Tensor) -> Tensor + Send + Sync;

/// A loss of a program's own.
#[derive(Clone)]
pub struct OwnLoss {
    f: Arc<LossFn>,
    /// What `f` makes is a sum to be divided by this, if there is one, or by the number of targets.
    weight: Option<(Arc<WeightFn>, MeanOver)>,
    what: String,
    made_at: &'static Location<'static>,
}

impl OwnLoss {
    #[track_caller]
    fn of(&self, output: &Tensor, target: &Tensor) -> Tensor {
        let loss = self.scalar("the loss", (self.f)(output, target));
        match &self.weight {
            None => loss,
            Some((weight, MeanOver::Counted)) => loss / self.scalar("the weight", weight(target)),
            Some((_, MeanOver::All)) => loss * (1.0 / target.count().max(1) as f64),
        }
    }

    /// What the mean is by, unless all targets count alike.
    fn weighs(&self) -> Option<&WeightFn> {
        self.weight.as_ref().filter(|(_, mean)| *mean == MeanOver::Counted).map(|(weight, _)| &**weight)
    }

    #[track_caller]
    fn scalar(&self, what: &str, made: Tensor) -> Tensor {
        assert!(
            made.dims().is_empty() && made.dtype().is_float(),
            "loss: {what} of {} is {} of shape {}: a single float would do, as of `mean_all`",
            self.made_at,
            made.dtype(),
            made.shape()
        );
        made
    }
}

/// By what it is and its place in the program: ranks that have others are told apart by it.
impl fmt::Debug for OwnLoss {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {}", self.what, self.made_at)
    }
}

/// Whether they are the same function, and not another one that does the same.
impl PartialEq for OwnLoss {
    fn eq(&self, other: &OwnLoss) -> bool {
        Arc::ptr_eq(&self.f, &other.f)
    }
}

/// How much labels count in a cross entropy, as in PyTorch: the mean is that by the weights of the labels, and NaN where none counts. It is
/// made of other operations, which stores more than the plain cross entropy does.
///
/// Where the trainer shares samples out, among ranks, micro-batches or the batches of a step, labels count as in one batch of all of them.
/// In a program's own loop each part's mean is by what its own labels count, and parts of unlike weights don't make up the whole: there
/// [`Loss::over_all`] of each part does, and [`Loss::counts`] tells what to divide by in the end.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct WeightedCrossEntropy {
    /// How much of the target is spread over all classes, in [0, 1), by their weights.
    pub label_smoothing: f64,
    /// What each class counts: a number a class, or none where all count 1.
    pub weights: Vec<f32>,
    /// The label of what doesn't count, as of what fills up sequences: no class needs to have it.
    pub ignored: Option<i64>,
    /// What the sum is divided by.
    pub mean: MeanOver,
}

/// What the sum of a [`WeightedCrossEntropy`] is divided by.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MeanOver {
    /// What its labels count together, as in PyTorch.
    #[default]
    Counted,
    /// The number of labels, also of those that don't count. Such means of parts of a batch make up that of the whole by their samples.
    All,
}

impl WeightedCrossEntropy {
    /// Of logits (N, C) with labels, i64 of (N): a scalar.
    ///
    /// ```
    /// use phalanx_nn::WeightedCrossEntropy;
    /// use phalanx_tensor::{Device, Tensor};
    ///
    /// let device = Device::cpu(1);
    /// let logits = Tensor::from_slice(&device, &[0.0f32, 0.0, 5.0, 1.0], [2, 2]);
    /// let labels = Tensor::from_slice(&device, &[1i64, -100], [2]);
    /// let loss = WeightedCrossEntropy { ignored: Some(-100), ..WeightedCrossEntropy::default() };
    /// assert!((loss.of(&logits, &labels).item() - 2f64.ln()).abs() < 1e-6);
    /// ```
    #[track_caller]
    pub fn of(&self, logits: &Tensor, labels: &Tensor) -> Tensor {
        let (&[n, classes], &[m]) = (logits.dims(), labels.dims()) else {
            panic!(
                "loss: scores of shape {} with labels of {}: (N, C) with (N) would do",
                logits.shape(),
                labels.shape()
            )
        };
        assert!(n == m, "loss: {n} rows of scores with {m} labels");
        check_smoothing(self.label_smoothing);
        assert!(
            self.weights.is_empty() || self.weights.len() == classes,
            "loss: {} weights for {classes} classes",
            self.weights.len()
        );
        let log = wide(logits).log_softmax(1);
        let zero = Tensor::scalar(log.device(), 0.0, log.dtype());
        let counts = self.ignored.map(|ignored| labels.ne(ignored as f64));
        let counted = |x: Tensor| match &counts {
            Some(counts) => counts.where_cond(&x, &zero),
            None => x,
        };
        // A label that doesn't count may be no class.
        let label = match &counts {
            Some(counts) => counts.where_cond(labels, &Tensor::scalar(labels.device(), 0.0, DType::I64)),
            None => labels.clone(),
        };
        log.check_labels("cross_entropy", &label);
        let weights = match self.weights.is_empty() {
            true => Tensor::ones(log.device(), [classes], log.dtype()),
            false => Tensor::constant(log.device(), &self.weights, [classes]).cast(log.dtype()),
        };
        let weight = counted(weights.gather(0, &label));
        let own = log.gather(1, &label.unsqueeze(1)).squeeze(1);
        let own = counted(own * &weight).sum_all() * (self.label_smoothing - 1.0);
        let sum = match self.label_smoothing {
            0.0 => own,
            smoothing => {
                let all = counted((&log * &weights).sum(&[1], Keep::No)).sum_all();
                own - all * (smoothing / classes as f64)
            }
        };
        match self.mean {
            MeanOver::Counted => sum / weight.sum_all(),
            MeanOver::All => sum * (1.0 / n.max(1) as f64),
        }
    }

    /// What these labels count together. One that is no class counts nothing.
    fn counts(&self, labels: &[i64]) -> f64 {
        let counted = labels.iter().filter(|label| Some(**label) != self.ignored);
        match self.weights.is_empty() {
            true => counted.count() as f64,
            false => counted
                .filter_map(|&label| self.weights.get(usize::try_from(label).ok()?))
                .map(|weight| f64::from(*weight))
                .sum(),
        }
    }
}

/// `output - target` of the same shape.
#[track_caller]
fn off(output: &Tensor, target: &Tensor) -> Tensor {
    check_alike("loss", output, target);
    wide(output) - wide(target)
}

/// In no fewer than 32 bits: sums of many are larger than what floats of 16 hold.
fn wide(x: &Tensor) -> Tensor {
    if x.dtype().is_half() { x.cast(DType::F32) } else { x.clone() }
}

/// Outputs and targets of another shape would be repeated.
#[track_caller]
pub(crate) fn check_alike(what: &str, output: &Tensor, target: &Tensor) {
    assert!(
        output.dims() == target.dims() && target.dtype().is_float(),
        "{what}: outputs of shape {} with targets of {}, {}: floats of the same shape would do",
        output.shape(),
        target.shape(),
        target.dtype()
    );
}

#[track_caller]
fn check_smoothing(smoothing: f64) {
    assert!((0.0..1.0).contains(&smoothing), "loss: label smoothing must lie in [0, 1), got {smoothing}");
}

/// The cross entropy of log-probabilities and shares of the classes, both (N, C).
#[track_caller]
fn shared(log: &Tensor, shares: &Tensor, label_smoothing: f64) -> Tensor {
    let &[n, classes] = log.dims() else { panic!("loss: scores of shape {}: (N, C) would do", log.shape()) };
    assert!(
        shares.dims() == log.dims(),
        "loss: scores of shape {} with shares of {}",
        log.shape(),
        shares.shape()
    );
    check_smoothing(label_smoothing);
    let shares = shares * (1.0 - label_smoothing) + label_smoothing / classes as f64;
    (log * shares).sum_all() * (-1.0 / n as f64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use phalanx_tensor::Device;

    const SMOOTHED: Loss = Loss::CrossEntropy { label_smoothing: 0.1 };
    const PLAIN: Loss = Loss::CrossEntropy { label_smoothing: 0.0 };

    /// The loss and its gradient for logits of two samples and three classes.
    fn of(loss: &Loss, target: &Tensor) -> (f64, Vec<f32>) {
        let logits = Tensor::from_slice(target.device(), &[0.5f32, -1.0, 2.0, 0.0, 3.0, 1.0], [2, 3]);
        let logits = logits.requires_grad();
        let input = if *loss == Loss::Nll { logits.log_softmax(1) } else { logits.clone() };
        let value = loss.of(&input, target);
        let grads = value.backward();
        (value.item(), grads.get(&logits).unwrap().to_vec::<f32>())
    }

    #[test]
    fn whole_shares_are_labels() {
        let device = Device::cpu(1);
        let labels = Tensor::from_slice(&device, &[2i64, 0], [2]);
        let shares = Tensor::from_slice(&device, &[0.0f32, 0.0, 1.0, 1.0, 0.0, 0.0], [2, 3]);
        for loss in [Loss::Nll, PLAIN, SMOOTHED] {
            let ((value, grads), (expected, expected_grads)) = (of(&loss, &shares), of(&loss, &labels));
            assert!((value - expected).abs() < 1e-6, "{loss:?}: {value}, not {expected}");
            assert!(
                grads.iter().zip(&expected_grads).all(|(a, b)| (a - b).abs() < 1e-6),
                "{loss:?}: {grads:?}"
            );
        }
    }

    /// `F.cross_entropy(logits, shares, label_smoothing=s)` in PyTorch, float64.
    #[test]
    fn shares_give_pytorchs_loss() {
        let shares = [0.7f32, 0.3, 0.0, 0.0, 0.25, 0.75];
        let shares = Tensor::from_slice(&Device::cpu(1), &shares, [2, 3]);
        for (loss, expected) in [(PLAIN, PLAIN_LOSS), (SMOOTHED, SMOOTHED_LOSS)] {
            let (value, _) = of(&loss, &shares);
            assert!((value - expected).abs() < 1e-6, "{loss:?}: {value}, not {expected}");
        }
    }

    /// PyTorch's `huber_loss`, `l1_loss` and `binary_cross_entropy_with_logits(pos_weight=w)`, float64.
    #[test]
    fn losses_of_values_are_pytorch_s() {
        let device = Device::cpu(1);
        let target = Tensor::from_slice(&device, &[1.0, 0.0, 0.25, 0.0, 1.0, 1.0], [2, 3]);
        let (sixth, twelfth) = (1.0 / 6.0, 1.0 / 12.0);
        let rows = [
            (Loss::l1(), 7.708_333_333, [-sixth, -sixth, sixth, 0.0, sixth, -sixth]),
            (Loss::huber(1.0), 7.312_5, [-twelfth, -sixth, sixth, 0.0, sixth, -sixth]),
            (Loss::huber(0.5), 3.75, [-twelfth, -twelfth, twelfth, 0.0, twelfth, -twelfth]),
            (
                Loss::bce_with_positive_weights(&[1.0, 3.0, 0.5]),
                3.872_884_986,
                [-0.062_923_444, 0.044_823_570, 0.107_616_240, twelfth, -0.023_712_936, -twelfth],
            ),
        ];
        for (loss, want, want_grads) in rows {
            let output =
                Tensor::from_slice(&device, &[0.5, -1.0, 2.0, 0.0, 3.0, -40.0], [2, 3]).requires_grad();
            let value = loss.of(&output, &target);
            assert!((value.item() - want).abs() < 1e-8, "{}, not {want}", value.item());
            let grads = value.backward().get(&output).unwrap().to_vec::<f64>();
            let is_near = grads.iter().zip(want_grads).all(|(a, b)| (a - b).abs() < 1e-8);
            assert!(is_near, "{grads:?}, not {want_grads:?}");
            // In 16 bits, of outputs alone, they are those of numbers that were rounded.
            let half = loss.of(&output.cast(DType::BF16), &target.cast(DType::F32));
            assert!((half.item() - want).abs() < 1e-2 * want && half.dtype() == DType::F32);
        }
        let all = Loss::bce_with_positive_weights(&[4.0]);
        let output = Tensor::from_slice(&device, &[0.5, -1.0, 2.0, 0.0, 3.0, -40.0], [2, 3]);
        assert!((all.of(&output, &target).item() - 27.469_865_040).abs() < 1e-8);
    }

    #[test]
    #[should_panic(expected = "outputs of shape [3, 1] with targets of [3], f32: floats of the same shape")]
    fn targets_are_not_repeated() {
        let of = |shape: &[usize]| Tensor::zeros(&Device::cpu(1), shape, DType::F32);
        Loss::huber(1.0).of(&of(&[3, 1]), &of(&[3]));
    }

    /// `F.cross_entropy(logits, labels, weight=w, label_smoothing=s)` in PyTorch, float64, with a label of -100, which it passes over.
    #[test]
    fn weights_and_what_does_not_count_give_pytorchs_loss_and_gradients() {
        let device = Device::cpu(1);
        let logits = [0.5, -1.0, 2.0, 0.0, 3.0, 1.0, 1.0, f64::NAN, -0.5, 2.0, 0.25, -1.0];
        let labels = Tensor::from_slice(&device, &[2i64, 0, -100, 1], [4]);
        #[rustfmt::skip]
        let rows = [
            (0.0, vec![], 1.787_640_928, [0.058_430_131, 0.013_037_524, -0.071_467_655, -0.319_329_978, 0.281_264_911, 0.038_065_066, 0.272_428_861, -0.285_992_296, 0.013_563_434]),
            (0.0, vec![1.0, 0.5, 2.0], 1.322_386_099, [0.100_165_938, 0.022_350_042, -0.122_515_980, -0.273_711_410, 0.241_084_210, 0.032_627_200, 0.116_755_226, -0.122_568_127, 0.005_812_900]),
            (0.1, vec![], 1.787_640_928, [0.047_319_020, 0.001_926_413, -0.049_245_433, -0.297_107_756, 0.270_153_800, 0.026_953_955, 0.261_317_750, -0.263_770_074, 0.002_452_323]),
            (0.1, vec![1.0, 0.5, 2.0], 1.371_292_535, [0.086_468_548, 0.016_656_885, -0.103_125_433, -0.254_463_743, 0.240_340_375, 0.014_123_367, 0.122_798_780, -0.110_339_115, -0.012_459_665]),
        ];
        for (label_smoothing, weights, loss, grads) in rows {
            let logits = Tensor::from_slice(&device, &logits, [4, 3]).requires_grad();
            let of_some = WeightedCrossEntropy {
                label_smoothing,
                weights,
                ignored: Some(-100),
                ..WeightedCrossEntropy::default()
            };
            let what = format!("{of_some:?}");
            let value = Loss::WeightedCrossEntropy(of_some).of(&logits, &labels);
            assert!((value.item() - loss).abs() < 1e-8, "{what}: {}, not {loss}", value.item());
            let mut got = value.backward().get(&logits).unwrap().to_vec::<f64>();
            // The row that doesn't count learns nothing, except that what is no number stays so.
            got.drain(6..9);
            let is_near = got.iter().zip(&grads).all(|(a, b)| (a - b).abs() < 1e-8);
            assert!(is_near, "{what}: {got:?}, not {grads:?}");
        }
    }

    /// Scores of minus infinity are those of classes that are ruled out; and many rows of 16 bits have a sum that these don't hold.
    #[test]
    fn what_is_ruled_out_and_what_is_many_have_a_loss() {
        let device = Device::cpu(1);
        let logits = [0.0, f32::NEG_INFINITY, 1.0, 0.0, 0.0, f32::NEG_INFINITY];
        let logits = Tensor::from_slice(&device, &logits, [2, 3]);
        let labels = Tensor::from_slice(&device, &[0i64, 1], [2]);
        let none = WeightedCrossEntropy::default();
        let want = PLAIN.of(&logits, &labels).item();
        assert!((none.of(&logits, &labels).item() - want).abs() < 1e-6 && want.is_finite());
        let (zeros, labels) =
            (Tensor::zeros(&device, [40_000, 3], DType::F16), Tensor::zeros(&device, [40_000], DType::I64));
        assert!((none.of(&zeros, &labels).item() - 3f64.ln()).abs() < 1e-3);
    }

    #[test]
    #[should_panic(expected = "label -100 with scores of shape [1, 2]")]
    fn a_label_that_is_no_class_and_counts_is_named() {
        let device = Device::cpu(1);
        let labels = Tensor::from_slice(&device, &[-100i64], [1]);
        WeightedCrossEntropy::default().of(&Tensor::zeros(&device, [1, 2], DType::F32), &labels);
    }

    #[test]
    fn without_weights_it_is_the_plain_cross_entropy() {
        let labels = Tensor::from_slice(&Device::cpu(1), &[2i64, 0], [2]);
        for (plain, label_smoothing) in [(PLAIN, 0.0), (SMOOTHED, 0.1)] {
            let same = WeightedCrossEntropy { label_smoothing, ..WeightedCrossEntropy::default() };
            let ((value, grads), (expected, expected_grads)) =
                (of(&Loss::WeightedCrossEntropy(same), &labels), of(&plain, &labels));
            assert!((value - expected).abs() < 1e-6, "{value}, not {expected}");
            assert!(grads.iter().zip(&expected_grads).all(|(a, b)| (a - b).abs() < 1e-6));
        }
    }

    #[test]
    fn pixels_are_rows() {
        let device = Device::cpu(1);
        let scores: Vec<f32> = (0..2 * 3 * 2 * 2).map(|i| (i * 7 % 11) as f32).collect();
        let scores = Tensor::from_slice(&device, &scores, [2, 3, 2, 2]);
        let labels = Tensor::from_slice(&device, &[0i64, 2, 1, 1, 2, 0, 0, 1], [2, 4]);
        let rows = scores.permute(&[0, 2, 3, 1]).reshape([8, 3]);
        let want = PLAIN.of(&rows, &labels.reshape([8])).item();
        assert_eq!(PLAIN.of(&scores, &labels).item(), want);
        assert_eq!(PLAIN.of(&scores, &labels.reshape([2, 2, 2])).item(), want);
    }

    #[test]
    #[should_panic(expected = "(N, C, H, W) with (N, H W) would do")]
    fn labels_of_other_pixels_are_named() {
        let device = Device::cpu(1);
        let labels = Tensor::from_slice(&device, &[0i64, 2, 1], [3]);
        PLAIN.of(&Tensor::zeros(&device, [1, 3, 2, 2], DType::F32), &labels);
    }

    #[test]
    #[should_panic(expected = "a single float would do")]
    fn a_loss_of_ones_own_is_a_scalar() {
        let x = Tensor::from_slice(&Device::cpu(1), &[1.0f32, 2.0], [2]);
        Loss::own(|output, target| output - target).of(&x, &x);
    }

    const PLAIN_LOSS: f64 = 1.930_578_667;
    const SMOOTHED_LOSS: f64 = 1.916_411_999;
}
