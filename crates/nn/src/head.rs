//! A trained body under a new head: the weights of a file without its classifier, as when a network that knows 1000 classes
//! is to learn ten others.

use crate::parameters::{Mismatch, Parameters};
use crate::weights::Weights;

impl Parameters {
    /// The names of the head: the weight of the last dense layer, which is the last parameter of two dimensions, and its bias.
    pub fn head(&self) -> Vec<&str> {
        let names = self.names();
        let is_weight = |i: &usize| self.layout().shape(*i).n_dims() == 2 && names[*i].ends_with("weight");
        let Some(weight) = (0..names.len()).rev().find(is_weight).map(|i| names[i].as_str()) else {
            return Vec::new();
        };
        let bias = format!("{}bias", weight.strip_suffix("weight").expect("it ends so"));
        names.iter().map(String::as_str).filter(|name| *name == weight || *name == bias).collect()
    }

    /// Takes the values from a file of weights as [`Parameters::load`] does, but for the head, which is taken where it fits
    /// whole and else keeps the values it has. Gives the names of what kept them.
    ///
    /// ```
    /// use phalanx_nn::{Linear, Parameters, Sequential};
    /// use phalanx_tensor::Device;
    ///
    /// let net = |classes| Sequential::new().then(Linear::new(4, 3)).then(Linear::new(3, classes));
    /// let trained = Parameters::build(&mut net(1000), &Device::cpu(1), 0).to_weights();
    /// let parameters = Parameters::build(&mut net(10), &Device::cpu(1), 1);
    /// assert_eq!(parameters.load_but_head(&trained)?, ["1.weight", "1.bias"]);
    /// assert_eq!(parameters.value(0).to_vec::<f32>(), trained.get("0.weight").unwrap().1);
    /// # Ok::<(), phalanx_nn::Mismatch>(())
    /// ```
    pub fn load_but_head(&self, weights: &Weights) -> Result<Vec<String>, Mismatch> {
        let mismatch = self.compare(weights);
        if mismatch.is_empty() {
            self.load_matching(weights);
            return Ok(Vec::new());
        }
        if !self.concerns_head_alone(&mismatch) {
            return Err(mismatch);
        }
        let head = self.head();
        self.load_where(weights, |name| !head.contains(&name));
        Ok(head.into_iter().map(str::to_owned).collect())
    }

    /// Whether nothing but the head doesn't fit, so that [`Parameters::load_but_head`] would do.
    pub fn concerns_head_alone(&self, mismatch: &Mismatch) -> bool {
        let head = self.head();
        let misshaped = mismatch.misshaped.iter().map(|(name, ..)| name);
        mismatch.unexpected.is_empty()
            && mismatch.missing.iter().chain(misshaped).all(|name| head.contains(&name.as_str()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::models::{MnistNet, ResNet, ResNetDepth, ResNetStem};
    use crate::{LayerNorm, Linear, Module, Sequential};
    use phalanx_tensor::Device;

    fn built(mut model: impl Module, seed: u64) -> Parameters {
        Parameters::build(&mut model, &Device::cpu(1), seed)
    }

    fn resnet(classes: usize, seed: u64) -> Parameters {
        built(ResNet::new(ResNetDepth::D18, ResNetStem::Imagenet, classes), seed)
    }

    #[test]
    fn the_last_dense_layer_is_the_head() {
        assert_eq!(resnet(10, 0).head(), ["fc.weight", "fc.bias"]);
        assert_eq!(built(MnistNet::new(0.0), 0).head(), ["fc2.weight", "fc2.bias"]);
        let unbiased = Sequential::new().then(Linear::new(2, 2).without_bias()).then(LayerNorm::new(2));
        assert_eq!(built(unbiased, 0).head(), ["0.weight"]);
        assert_eq!(built(Linear::new(1, 1), 0).head(), ["weight", "bias"]);
        assert!(built(LayerNorm::new(2), 0).head().is_empty());
    }

    #[test]
    fn a_body_is_taken_whole_and_a_head_that_does_not_fit_stays_fresh() {
        let trained = resnet(1000, 1).to_weights();
        let (parameters, fresh) = (resnet(10, 2), resnet(10, 2).to_weights());
        assert_eq!(parameters.load_but_head(&trained).unwrap(), ["fc.weight", "fc.bias"]);
        let loaded = parameters.to_weights();
        for name in loaded.names() {
            let source = if name.starts_with("fc.") { &fresh } else { &trained };
            assert_eq!(loaded.get(name), source.get(name), "{name}");
        }
        // A head that fits is taken, too.
        assert!(resnet(10, 3).load_but_head(&loaded).unwrap().is_empty());
    }

    #[test]
    fn a_body_that_does_not_fit_changes_nothing() {
        let net = |inputs| Sequential::new().then(Linear::new(inputs, 3)).then(Linear::new(3, 2));
        let parameters = built(net(4), 0);
        let before = parameters.to_weights();
        let refused = |weights: &Weights| {
            let error = parameters.load_but_head(weights).unwrap_err().to_string();
            assert_eq!(parameters.to_weights(), before);
            error
        };
        let error = refused(&built(net(5), 0).to_weights());
        assert!(error.contains("0.weight is [3, 5] in the file and [3, 4] in the model"), "{error}");
        let mut more = before.clone();
        more.push("classifier.weight".into(), [1].into(), &[0.0]);
        assert!(refused(&more).contains("unexpected: classifier.weight"));
        assert!(refused(&Weights::default()).contains("missing: 0.weight, 0.bias, 1.weight, 1.bias"));
    }
}
