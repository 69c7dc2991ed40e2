//! Numbers that test samples are judged by beside the loss.
//!
//! The mean IoU of all samples isn't the mean of those of their batches. So each number is a function of sums over all samples, which
//! add up over batches and ranks.

use crate::loss::{Loss, check_alike};
use phalanx_tensor::{DType, Keep, Tensor};
use std::fmt;
use std::panic::Location;
use std::sync::Arc;

/// A number that test samples are judged by, the same however they are shared out among batches and ranks.
///
/// ```
/// use phalanx_nn::Metric;
/// use phalanx_tensor::{Device, Tensor};
///
/// let device = Device::cpu(1);
/// let scores = Tensor::from_slice(&device, &[0.9f32, 0.1, 0.2, 0.8, 0.6, 0.4], [3, 2]);
/// let labels = Tensor::from_slice(&device, &[0i64, 1, 1], [3]);
/// assert_eq!(Metric::balanced_accuracy(2).of(&scores, &labels), 0.75);
/// ```
#[derive(Clone)]
pub struct Metric {
    name: Arc<str>,
    n_parts: usize,
    n_sums: usize,
    parts: Arc<PartsFn>,
    add: AddFn,
    value: Arc<ValueFn>,
    ignored: Option<i64>,
    lower_is_better: bool,
    made_at: &'static Location<'static>,
}

/// What makes numbers of some samples' outputs, their targets, and the label that doesn't count.
type PartsFn = dyn Fn(&Tensor, &Tensor, Option<i64>) -> Tensor + Send + Sync;

/// What adds such numbers to the sums over all samples, in float64.
type AddFn = fn(&[f32], &mut [f64]);

/// What makes the metric of these sums.
type ValueFn = dyn Fn(&[f64]) -> f64 + Send + Sync;

/// Of one class: how many labels were told right, how often it was told, and how many labels are of it.
type OfClass = [f64; 3];

impl Metric {
    /// A metric of a program's own: `sums` gives `n_sums` numbers of some samples' outputs, in float32, and targets, a tensor of shape
    /// (`n_sums`); of what they add up to over all samples, `value` makes the metric. Larger ones are better, unless
    /// [`Metric::lower_is_better`] says otherwise.
    ///
    /// Where ranks hold a stretch of each sequence (`parallel.context`), it is given stretches, and sums over positions come to the mean of
    /// those of these ranks: shares of such sums are right.
    ///
    /// ```
    /// use phalanx_nn::Metric;
    /// use phalanx_tensor::{Device, Tensor};
    ///
    /// // The mean error beside the mean target, of things that are sold by the piece and by the dozen.
    /// let error = Metric::own(
    ///     "weighted_error",
    ///     2,
    ///     |output, target| {
    ///         assert_eq!(output.dims(), target.dims(), "else one is repeated");
    ///         let sums = [(output - target).abs(), target.abs()].map(|all| all.sum_all().reshape([1]));
    ///         Tensor::cat(&sums.each_ref(), 0)
    ///     },
    ///     |sums| sums[0] / sums[1],
    /// );
    /// let device = Device::cpu(1);
    /// let [output, target] = [[1.0f32, 2.0, 3.5], [1.0, 2.0, 3.0]].map(|x| Tensor::from_slice(&device, &x, [3]));
    /// assert_eq!(error.lower_is_better().of(&output, &target), 0.5 / 6.0);
    /// ```
    #[track_caller]
    pub fn own(
        name: &str,
        n_sums: usize,
        sums: impl Fn(&Tensor, &Tensor) -> Tensor + Send + Sync + 'static,
        value: impl Fn(&[f64]) -> f64 + Send + Sync + 'static,
    ) -> Metric {
        Metric::with(name, [n_sums; 2], move |outputs, target, _| sums(outputs, target), add, value)
    }

    /// The mean of all numbers that `f` makes of some samples' outputs and targets, a tensor of any shape. Larger ones are better, unless
    /// [`Metric::lower_is_better`] says otherwise.
    #[track_caller]
    pub fn mean(name: &str, f: impl Fn(&Tensor, &Tensor) -> Tensor + Send + Sync + 'static) -> Metric {
        let sums = move |outputs: &Tensor, target: &Tensor, _: Option<i64>| {
            let numbers = f(outputs, target).cast(DType::F32);
            let count = Tensor::scalar(numbers.device(), numbers.count() as f64, DType::F32);
            Tensor::cat(&[&numbers.sum_all().reshape([1]), &count.reshape([1])], 0)
        };
        Metric::with(name, [2; 2], sums, add, |sums| sums[0] / sums[1])
    }

    /// `mean_absolute_error`: how far outputs are from targets of the same shape. Lower ones are better.
    #[track_caller]
    pub fn mean_absolute_error() -> Metric {
        Metric::mean("mean_absolute_error", |outputs, target| off(outputs, target).abs()).lower_is_better()
    }

    /// `root_mean_squared_error`: the same by the root of the mean square, which large errors weigh more in. Lower ones are better.
    #[track_caller]
    pub fn root_mean_squared_error() -> Metric {
        let mean = Metric::mean("root_mean_squared_error", |outputs, target| off(outputs, target).square());
        Metric { value: Arc::new(|sums: &[f64]| (sums[0] / sums[1]).sqrt()), ..mean }.lower_is_better()
    }

    /// `r2`: which share of the variance of all targets together outputs of the same shape explain: 1 where they are the targets, 0 where
    /// they are no nearer than the targets' mean; NaN where all targets are the same.
    ///
    /// ```
    /// use phalanx_nn::Metric;
    /// use phalanx_tensor::{Device, Tensor};
    ///
    /// let device = Device::cpu(1);
    /// let [output, target] = [[1.0f32, 2.0, 3.5], [1.0, 2.0, 3.0]].map(|x| Tensor::from_slice(&device, &x, [3]));
    /// assert_eq!(Metric::r2().of(&output, &target), 0.875);
    /// ```
    #[track_caller]
    pub fn r2() -> Metric {
        // Squares of what lies far from 0 hide the variance in float32, so those of a batch are of what lies beside its mean.
        let parts = |outputs: &Tensor, target: &Tensor, _: Option<i64>| {
            let (error, target) = (off(outputs, target), target.cast(DType::F32));
            let count = Tensor::scalar(target.device(), target.count() as f64, DType::F32);
            let mean = target.mean_all();
            let beside = &target - &mean;
            let parts = [error.square().sum_all(), count, mean, beside.sum_all(), beside.square().sum_all()];
            Tensor::cat(&parts.map(|part| part.reshape([1])).each_ref(), 0)
        };
        let add = |parts: &[f32], sums: &mut [f64]| {
            let [error, count, mean, beside, squares] = std::array::from_fn(|i| f64::from(parts[i]));
            let target = count * mean + beside;
            let more = [error, count, target, squares + 2.0 * mean * beside + count * mean * mean];
            sums.iter_mut().zip(more).for_each(|(sum, more)| *sum += more);
        };
        let value = |sums: &[f64]| {
            let squares = sums[3] - sums[2] * sums[2] / sums[1];
            // Of targets that are all the same there is nothing to explain but what rounding left.
            if squares > 1e-12 * sums[3] { 1.0 - sums[0] / squares } else { f64::NAN }
        };
        Metric::with("r2", [5, 4], parts, add, value)
    }

    /// `balanced_accuracy`: the mean over the classes of the share of their labels that is told right, so that rare ones matter as much
    /// as others; of those that have a label. Takes labels as [`Metric::macro_f1`] does: of classes that are there or not, the share of
    /// those found would be best where all are told to be there.
    #[track_caller]
    pub fn balanced_accuracy(classes: usize) -> Metric {
        let metric =
            Metric::mean_over_classes("balanced_accuracy", classes, |[right, _, labels]| (right, labels));
        let all = metric.parts.clone();
        let parts = move |scores: &Tensor, target: &Tensor, ignored: Option<i64>| {
            assert!(
                target.dtype() == DType::I64,
                "metric: balanced_accuracy of targets of {}: it takes labels, i64; macro_f1 takes others",
                target.dtype()
            );
            all(scores, target, ignored)
        };
        Metric { parts: Arc::new(parts), ..metric }
    }

    /// `macro_f1`: the mean over the classes of their F1, the harmonic mean of precision and recall; of those that are told, or have a
    /// label.
    ///
    /// Takes scores with labels as [`Loss::of`](crate::Loss::of) does, without those that the loss leaves out. Where targets are 0 or 1
    /// and have the scores' shape (.., `classes`), each class is there or not, and told to be where its score is above 0. Exact as long
    /// as a batch has less than 2^24 labels of a class.
    #[track_caller]
    pub fn macro_f1(classes: usize) -> Metric {
        Metric::mean_over_classes("macro_f1", classes, |[right, told, labels]| (2.0 * right, told + labels))
    }

    /// `mean_iou`: the mean over the classes of the intersection over union (Jaccard index) of where they are told and where they are,
    /// as pixels are judged by; of those that are anywhere. Takes what [`Metric::macro_f1`] takes.
    #[track_caller]
    pub fn mean_iou(classes: usize) -> Metric {
        Metric::mean_over_classes("mean_iou", classes, |[right, told, labels]| (right, told + labels - right))
    }

    /// The mean of shares of the classes, each a numerator and a denominator, of those whose denominator isn't 0.
    #[track_caller]
    fn mean_over_classes(name: &str, classes: usize, share: fn(OfClass) -> (f64, f64)) -> Metric {
        let value = move |sums: &[f64]| {
            let shares = (0..classes)
                .map(|class| share([sums[class], sums[classes + class], sums[2 * classes + class]]))
                .filter(|&(_, of)| of > 0.0)
                .map(|(part, of)| part / of);
            let (total, n) = shares.fold((0.0, 0.0), |(total, n), share| (total + share, n + 1.0));
            total / n
        };
        let sums =
            move |scores: &Tensor, target: &Tensor, ignored| by_class(scores, target, classes, ignored);
        Metric::with(name, [3 * classes; 2], sums, add, value)
    }

    #[track_caller]
    fn with(
        name: &str,
        [n_parts, n_sums]: [usize; 2],
        parts: impl Fn(&Tensor, &Tensor, Option<i64>) -> Tensor + Send + Sync + 'static,
        add: AddFn,
        value: impl Fn(&[f64]) -> f64 + Send + Sync + 'static,
    ) -> Metric {
        let (parts, value) = (Arc::new(parts), Arc::new(value));
        let (name, made_at) = (name.into(), Location::caller());
        Metric { name, n_parts, n_sums, parts, add, value, ignored: None, lower_is_better: false, made_at }
    }

    /// The same where lower ones are better, as of errors.
    pub fn lower_is_better(self) -> Metric {
        Metric { lower_is_better: true, ..self }
    }

    /// The same of classes without labels of this number, which needn't be a class. Else those are left out that the loss leaves out, where
    /// it is a [`Loss::WeightedCrossEntropy`].
    pub fn ignoring(self, label: i64) -> Metric {
        Metric { ignored: Some(label), ..self }
    }

    /// The same under another name.
    pub fn named(self, name: &str) -> Metric {
        Metric { name: name.into(), ..self }
    }

    /// What it is called.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// How many sums it is made of.
    pub fn n_sums(&self) -> usize {
        self.n_sums
    }

    /// Whether `new` is better than `old`. What is no number is never better.
    pub fn prefers(&self, new: f64, old: f64) -> bool {
        if self.lower_is_better { new < old } else { new > old }
    }

    /// What some samples come to, on their device: f32 of one row, for [`Metric::add`]. `ignored` is the label of what doesn't count by the
    /// loss, if there is one; [`Metric::ignoring`] comes before that.
    #[track_caller]
    pub fn parts(&self, outputs: &Tensor, target: &Tensor, ignored: Option<i64>) -> Tensor {
        let parts = (self.parts)(&outputs.cast(DType::F32), target, self.ignored.or(ignored));
        assert!(
            *parts.dims() == [self.n_parts],
            "metric: {} of {} gave sums of shape {}: its {} in one row would do",
            self.name,
            self.made_at,
            parts.shape(),
            self.n_parts
        );
        parts.cast(DType::F32)
    }

    /// Adds what some samples come to ([`Metric::parts`]) to the sums over all, of which there are [`Metric::n_sums`].
    pub fn add(&self, parts: &[f32], sums: &mut [f64]) {
        (self.add)(parts, sums);
    }

    /// The metric of all samples together whose sums these are; NaN where there is nothing to divide by.
    pub fn value(&self, sums: &[f64]) -> f64 {
        (self.value)(sums)
    }

    /// The metric of these samples alone.
    #[track_caller]
    pub fn of(&self, outputs: &Tensor, target: &Tensor) -> f64 {
        let mut sums = vec![0.0; self.n_sums];
        self.add(&self.parts(outputs, target, None).to_vec::<f32>(), &mut sums);
        self.value(&sums)
    }
}

/// By its name and its place in the program: ranks that have others are told apart by it.
impl fmt::Debug for Metric {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {} sums of {}", self.name, self.n_sums, self.made_at)
    }
}

/// Adds each number to its sum.
fn add(parts: &[f32], sums: &mut [f64]) {
    sums.iter_mut().zip(parts).for_each(|(sum, &part)| *sum += f64::from(part));
}

/// `outputs - target` of the same shape.
#[track_caller]
fn off(outputs: &Tensor, target: &Tensor) -> Tensor {
    check_alike("metric", outputs, target);
    outputs - target.cast(DType::F32)
}

/// How many labels of each class were told right, then how often each was told, then how many labels each has.
#[track_caller]
fn by_class(scores: &Tensor, target: &Tensor, classes: usize, ignored: Option<i64>) -> Tensor {
    let [told, labels] = if target.dtype() == DType::I64 {
        let [scores, labels] = Loss::rows(scores, target);
        check_classes(&scores, classes);
        // What doesn't count is of a class behind the others.
        let beyond = Tensor::scalar(labels.device(), classes as f64, DType::I64);
        let all = classes + usize::from(ignored.is_some());
        let counts = ignored.map(|ignored| labels.ne(ignored as f64));
        let counted =
            |labels: Tensor| counts.as_ref().map_or(labels.clone(), |c| c.where_cond(&labels, &beyond));
        [scores.argmax(1), labels].map(|labels| counted(labels).one_hot(0..classes, all, DType::F32))
    } else {
        check_classes(scores, classes);
        assert!(
            scores.dims() == target.dims(),
            "metric: scores of shape {} with targets of {}: labels, or a target a score would do",
            scores.shape(),
            target.shape()
        );
        let rows = [target.count() / classes.max(1), classes];
        [scores.gt(0.0), target.gt(0.5)].map(|is_there| is_there.cast(DType::F32).reshape(rows))
    };
    let sums = [&told * &labels, told, labels].map(|of| of.sum(&[0], Keep::No));
    Tensor::cat(&sums.each_ref(), 0)
}

#[track_caller]
fn check_classes(scores: &Tensor, classes: usize) {
    let last = scores.dims().last().copied();
    assert!(
        last == Some(classes),
        "metric: scores of shape {} for {classes} classes: scores of as many would do",
        scores.shape()
    );
}

#[cfg(test)]
mod tests {
    use super::*;
    use phalanx_tensor::Device;

    /// Scores whose largest is at these places.
    fn scores(told: &[usize], classes: usize) -> Vec<f32> {
        let row = |told: &usize| {
            (0..classes).map(|class| if class == *told { 2.0 } else { -1.0 }).collect::<Vec<_>>()
        };
        told.iter().flat_map(row).collect()
    }

    fn near(got: f64, want: f64) -> bool {
        (got - want).abs() < 1e-12
    }

    /// Of scikit-learn: `f1_score(y, told, average="macro")`, `balanced_accuracy_score` and `jaccard_score(.., average="macro")`. Class 3
    /// is nowhere; class 4 is told and isn't there.
    #[test]
    fn numbers_of_classes_are_those_of_scikit_learn() {
        let device = Device::cpu(1);
        let (told, labels) = ([0, 0, 1, 2, 1, 4, 0, 2], [0i64, 0, 1, 1, 1, 2, 2, 2]);
        let rows = [
            (Metric::macro_f1(5), 0.5),
            (Metric::balanced_accuracy(5), 2.0 / 3.0),
            (Metric::mean_iou(5), 0.395_833_333_333_333_3),
        ];
        for (metric, want) in rows {
            let labels = Tensor::from_slice(&device, &labels, [8]);
            let of_rows = Tensor::from_slice(&device, &scores(&told, 5), [8, 5]);
            let got = metric.of(&of_rows, &labels);
            assert!(near(got, want), "{metric:?}: {got}, not {want}");
            // As pixels of two images of 2 x 2.
            let of_pixels = of_rows.reshape([2, 2, 2, 5]).permute(&[0, 3, 1, 2]);
            assert!(near(metric.of(&of_pixels, &labels.reshape([2, 4])), want), "{metric:?}");
            // What doesn't count changes nothing, whatever is told of it.
            let more = [&scores(&told, 5)[..], &scores(&[3, 0], 5)].concat();
            let more = Tensor::from_slice(&device, &more, [10, 5]);
            let ignored = Tensor::from_slice(&device, &[0i64, 0, 1, 1, 1, 2, 2, 2, -100, -100], [10]);
            let mut sums = vec![0.0; metric.n_sums()];
            metric.add(&metric.parts(&more, &ignored, Some(-100)).to_vec::<f32>(), &mut sums);
            assert!(near(metric.clone().ignoring(-100).of(&more, &ignored), want), "{metric:?}");
            assert!(near(metric.value(&sums), want), "{metric:?}");
        }
    }

    /// The mean of `f1_score(targets, scores > 0, average=None)[:2]`: the third class never is there, nor told to be.
    #[test]
    fn classes_may_be_there_together() {
        let device = Device::cpu(1);
        let scores =
            Tensor::from_slice(&device, &[1.0f32, -1.0, -2.0, 0.5, 3.0, -1.0, -0.5, 2.0, -1.0], [3, 3]);
        let targets = Tensor::from_slice(&device, &[1.0f32, 1.0, 0.0, 0.0, 1.0, 0.0, 1.0, 0.0, 0.0], [3, 3]);
        assert!(near(Metric::macro_f1(3).of(&scores, &targets), 0.5));
    }

    #[test]
    fn means_are_over_all_numbers() {
        let device = Device::cpu(1);
        let [output, target] = [[1.0f32, 2.0, 5.0, 4.0], [1.0, 4.0, 4.0, 4.0]];
        let [output, target] = [output, target].map(|x| Tensor::from_slice(&device, &x, [2, 2]));
        let metric = Metric::mean_absolute_error();
        assert_eq!(metric.of(&output, &target), 0.75);
        assert!(metric.prefers(0.5, 0.75) && !metric.prefers(f64::NAN, 0.75));
        let parts = metric.parts(&output.cast(DType::BF16), &target, None);
        assert_eq!(parts.to_vec::<f32>(), [3.0, 4.0]);
        assert_eq!(Metric::root_mean_squared_error().of(&output, &target), (5.0f64 / 4.0).sqrt());
    }

    /// Targets that differ by far less than they lie from 0, in unlike batches.
    #[test]
    fn r2_is_that_of_all_samples_however_far_from_0_they_lie() {
        let device = Device::cpu(1);
        let target: Vec<f32> =
            (0..3000).map(|i| 20_000.0 + (i * 37 % 101) as f32 / 8.0 - i as f32 / 500.0).collect();
        let output: Vec<f32> =
            target.iter().enumerate().map(|(i, y)| y + (i * 53 % 97) as f32 / 32.0).collect();
        let of = |numbers: &[f32]| numbers.iter().map(|&y| f64::from(y)).collect::<Vec<_>>();
        let (y, told) = (of(&target), of(&output));
        let mean = y.iter().sum::<f64>() / 3000.0;
        let errors: f64 = y.iter().zip(&told).map(|(y, told)| (told - y).powi(2)).sum();
        let want = 1.0 - errors / y.iter().map(|y| (y - mean).powi(2)).sum::<f64>();
        let (metric, mut sums) = (Metric::r2(), vec![0.0; 4]);
        for batch in [0..7, 7..1500, 1500..3000] {
            let of = |all: &[f32]| Tensor::from_slice(&device, &all[batch.clone()], [batch.len(), 1]);
            metric.add(&metric.parts(&of(&output), &of(&target), None).to_vec::<f32>(), &mut sums);
        }
        assert!((metric.value(&sums) - want).abs() < 1e-6, "{}, not {want}", metric.value(&sums));
        let same = Tensor::full(&device, [1000], 0.1, DType::F32);
        assert!(metric.of(&(&same * 2.0), &same).is_nan());
    }

    #[test]
    #[should_panic(expected = "outputs of shape [3, 1] with targets of [3], f32: floats of the same shape")]
    fn numbers_are_not_repeated() {
        let device = Device::cpu(1);
        let of = |shape: &[usize]| Tensor::zeros(&device, shape, DType::F32);
        Metric::mean_absolute_error().of(&of(&[3, 1]), &of(&[3]));
    }

    #[test]
    #[should_panic(expected = "of shape []: its 2 in one row would do")]
    fn other_sums_are_refused() {
        let device = Device::cpu(1);
        let zeros = Tensor::zeros(&device, [3], DType::F32);
        Metric::own("mine", 2, |output, _| output.sum_all(), |sums| sums[0]).of(&zeros, &zeros);
    }

    #[test]
    #[should_panic(expected = "scores of shape [2, 3] for 4 classes")]
    fn scores_of_other_classes_are_refused() {
        let device = Device::cpu(1);
        let labels = Tensor::from_slice(&device, &[0i64, 1], [2]);
        Metric::mean_iou(4).of(&Tensor::zeros(&device, [2, 3], DType::F32), &labels);
    }
}
