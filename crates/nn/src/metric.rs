//! Numbers that test samples are judged by beside the loss.
//!
//! The mean IoU of all samples isn't the mean of those of their batches. So each number is a function of sums over all samples, which
//! add up over batches and ranks.

use crate::loss::Loss;
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
    n_sums: usize,
    sums: Arc<SumsFn>,
    value: Arc<ValueFn>,
    lower_is_better: bool,
    made_at: &'static Location<'static>,
}

/// What makes the sums over some samples of their outputs, their targets, and the label that doesn't count.
type SumsFn = dyn Fn(&Tensor, &Tensor, Option<i64>) -> Tensor + Send + Sync;

/// What makes the number of the sums over all samples.
type ValueFn = dyn Fn(&[f64]) -> f64 + Send + Sync;

/// Of one class: how many labels were told right, how often it was told, and how many labels are of it.
type OfClass = [f64; 3];

impl Metric {
    /// A metric of a program's own: `sums` gives `n_sums` numbers of some samples' outputs, in float32, and targets, a tensor of shape
    /// (`n_sums`); of what they add up to over all samples, `value` makes the metric. Larger ones are better, unless
    /// [`Metric::lower_is_better`] says otherwise.
    ///
    /// ```
    /// use phalanx_nn::Metric;
    /// use phalanx_tensor::{Device, Tensor};
    ///
    /// // How much of the targets' variance is explained.
    /// let r2 = Metric::own(
    ///     "r2",
    ///     4,
    ///     |output, target| {
    ///         let off = (output - target).square().sum_all();
    ///         let ones = target.affine(0.0, 1.0).sum_all();
    ///         let sums = [off, target.sum_all(), target.square().sum_all(), ones].map(|sum| sum.reshape([1]));
    ///         Tensor::cat(&sums.each_ref(), 0)
    ///     },
    ///     |sums| 1.0 - sums[0] / (sums[2] - sums[1] * sums[1] / sums[3]),
    /// );
    /// let device = Device::cpu(1);
    /// let [output, target] = [[1.0f32, 2.0, 3.5], [1.0, 2.0, 3.0]].map(|x| Tensor::from_slice(&device, &x, [3]));
    /// assert_eq!(r2.of(&output, &target), 0.875);
    /// ```
    #[track_caller]
    pub fn own(
        name: &str,
        n_sums: usize,
        sums: impl Fn(&Tensor, &Tensor) -> Tensor + Send + Sync + 'static,
        value: impl Fn(&[f64]) -> f64 + Send + Sync + 'static,
    ) -> Metric {
        Metric::with(name, n_sums, move |outputs, target, _| sums(outputs, target), value)
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
        Metric::with(name, 2, sums, |sums| sums[0] / sums[1])
    }

    /// `mean_absolute_error`: how far outputs are from targets of the same shape. Lower ones are better.
    #[track_caller]
    pub fn mean_absolute_error() -> Metric {
        Metric::mean("mean_absolute_error", |outputs, target| (outputs - target).abs()).lower_is_better()
    }

    /// `balanced_accuracy`: the mean over the classes of the share of their labels that is told right, so that rare ones matter as much
    /// as others; of those that have a label. Takes what [`Metric::macro_f1`] takes.
    #[track_caller]
    pub fn balanced_accuracy(classes: usize) -> Metric {
        Metric::mean_over_classes("balanced_accuracy", classes, |[right, _, labels]| (right, labels))
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
        Metric::with(name, 3 * classes, sums, value)
    }

    #[track_caller]
    fn with(
        name: &str,
        n_sums: usize,
        sums: impl Fn(&Tensor, &Tensor, Option<i64>) -> Tensor + Send + Sync + 'static,
        value: impl Fn(&[f64]) -> f64 + Send + Sync + 'static,
    ) -> Metric {
        let (sums, value) = (Arc::new(sums), Arc::new(value));
        Metric { name: name.into(), n_sums, sums, value, lower_is_better: false, made_at: Location::caller() }
    }

    /// The same where lower ones are better, as of errors.
    pub fn lower_is_better(self) -> Metric {
        Metric { lower_is_better: true, ..self }
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

    /// The sums of some samples: f32 of shape ([`Metric::n_sums`]). `ignored` is the label of what doesn't count, if there is one.
    #[track_caller]
    pub fn sums(&self, outputs: &Tensor, target: &Tensor, ignored: Option<i64>) -> Tensor {
        let sums = (self.sums)(&outputs.cast(DType::F32), target, ignored);
        assert!(
            *sums.dims() == [self.n_sums],
            "metric: {} of {} gave sums of shape {}: its {} in one row would do",
            self.name,
            self.made_at,
            sums.shape(),
            self.n_sums
        );
        sums.cast(DType::F32)
    }

    /// The metric of all samples together whose sums these are; NaN where there is nothing to divide by.
    pub fn value(&self, sums: &[f64]) -> f64 {
        (self.value)(sums)
    }

    /// The metric of these samples alone.
    #[track_caller]
    pub fn of(&self, outputs: &Tensor, target: &Tensor) -> f64 {
        let sums: Vec<f64> =
            self.sums(outputs, target, None).to_vec::<f32>().into_iter().map(f64::from).collect();
        self.value(&sums)
    }
}

/// By its name and its place in the program: ranks that have others are told apart by it.
impl fmt::Debug for Metric {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {} sums of {}", self.name, self.n_sums, self.made_at)
    }
}

/// How many labels of each class were told right, then how often each was told, then how many labels each has.
#[track_caller]
fn by_class(scores: &Tensor, target: &Tensor, classes: usize, ignored: Option<i64>) -> Tensor {
    let [told, labels] = if target.dtype() == DType::I64 {
        let [scores, labels] = Loss::rows(scores, target);
        check_classes(&scores, classes);
        // What doesn't count is of a class behind the others.
        let beyond = Tensor::scalar(labels.device(), classes as f64, DType::I64);
        let counts = ignored.map(|ignored| labels.ne(ignored as f64));
        let counted =
            |labels: Tensor| counts.as_ref().map_or(labels.clone(), |c| c.where_cond(&labels, &beyond));
        [scores.argmax(1), labels].map(|labels| counted(labels).one_hot(0..classes, classes + 1, DType::F32))
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
            let sums = metric.sums(&more, &ignored, Some(-100)).to_vec::<f32>();
            let sums: Vec<f64> = sums.into_iter().map(f64::from).collect();
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
        assert!(near(Metric::balanced_accuracy(3).of(&scores, &targets), 0.5));
    }

    #[test]
    fn means_are_over_all_numbers() {
        let device = Device::cpu(1);
        let [output, target] = [[1.0f32, 2.0, 5.0, 4.0], [1.0, 4.0, 4.0, 4.0]];
        let [output, target] = [output, target].map(|x| Tensor::from_slice(&device, &x, [2, 2]));
        let metric = Metric::mean_absolute_error();
        assert_eq!(metric.of(&output, &target), 0.75);
        assert!(metric.prefers(0.5, 0.75) && !metric.prefers(f64::NAN, 0.75));
        let sums = metric.sums(&output.cast(DType::BF16), &target, None);
        assert_eq!(sums.to_vec::<f32>(), [3.0, 4.0]);
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
