//! In which ways the workers of a run can hold its model.

use phalanx::Recipe;

/// A way.
pub(super) struct Way {
    /// As people call it.
    pub(super) name: String,
    /// What has to be set for it.
    pub(super) set: Vec<&'static str>,
    /// Whether it is what was asked for.
    pub(super) asked: bool,
    pub(super) recipe: Recipe,
}

/// What several workers can do, from what they tell each other least to what leaves them most.
const OF_SEVERAL: [&[&str]; 6] = [
    &["parallel.strategy=ddp"],
    &["parallel.strategy=fsdp", "parallel.zero=1"],
    &["parallel.strategy=fsdp", "parallel.zero=2"],
    &["parallel.strategy=fsdp", "parallel.zero=3"],
    &["parallel.strategy=fsdp", "parallel.zero=3", "parallel.recompute=blocks"],
    &["parallel.strategy=fsdp", "parallel.zero=3", "parallel.recompute=blocks", "parallel.offload=true"],
];
/// What one can.
const OF_ONE: [&[&str]; 3] = [
    &["parallel.strategy=ddp"],
    &["parallel.recompute=blocks"],
    &["parallel.strategy=fsdp", "parallel.zero=3", "parallel.recompute=blocks", "parallel.offload=true"],
];

/// The way that was asked for, and where it is one of these the others. A recipe that cuts its model in another way has that alone, and so
/// have cores, on which each would have to be computed.
/// What the rest of the recipe doesn't go with is given with the reason.
pub(super) fn ways(recipe: &Recipe, workers: usize, on_gpus: bool) -> (Vec<Way>, Vec<String>) {
    let own = || Way { name: "as asked".to_owned(), set: Vec::new(), asked: true, recipe: recipe.clone() };
    if !on_gpus || !are_replicas(recipe) {
        return (vec![own()], Vec::new());
    }
    let known: &[&[&'static str]] = if workers > 1 { &OF_SEVERAL } else { &OF_ONE };
    let way = |set: &&[&'static str]| {
        let mut with = recipe.clone();
        (with.parallel.strategy, with.parallel.zero, with.parallel.offload) = (None, None, false);
        with.parallel.recompute = None;
        with.set(set.iter().copied()).map_err(|error| format!("{}: {error}", name(set)))?;
        let asked = shares_alike(&with, recipe);
        Ok(Way { name: name(set), set: set.to_vec(), asked, recipe: with })
    };
    let (mut ways, mut others) = (Vec::new(), Vec::new());
    for set in known {
        match way(set) {
            Ok(way) => ways.push(way),
            Err(why) => others.push(why),
        }
    }
    match ways.iter_mut().find(|way| way.asked) {
        // What was typed, to the last key.
        Some(way) => way.recipe = recipe.clone(),
        None => ways.insert(0, own()),
    }
    (ways, others)
}

/// Whether each worker has samples of its own, and the whole model or a share of what it is.
pub(super) fn are_replicas(recipe: &Recipe) -> bool {
    let usual = recipe.parallel.strategy.as_deref().is_none_or(|name| ["ddp", "fsdp"].contains(&name));
    usual && !recipe.lies_on_mesh() && recipe.parallel.logical_shards.is_none()
}

/// Whether two recipes have workers hold the model alike.
fn shares_alike(a: &Recipe, b: &Recipe) -> bool {
    let words = |recipe: &Recipe| {
        let parallel = &recipe.parallel;
        let strategy = parallel.strategy.clone().unwrap_or_else(|| "ddp".to_owned());
        let zero = (strategy == "fsdp").then(|| parallel.zero.unwrap_or(3));
        (strategy, zero, parallel.offload, parallel.recompute.clone())
    };
    words(a) == words(b)
}

/// A way without its keys' names.
fn name(set: &[&str]) -> String {
    let words = set.iter().map(|set| match set.split_once('=').unwrap_or((set, "")) {
        ("parallel.strategy", strategy) => strategy.to_owned(),
        ("parallel.zero", stage) => format!("zero {stage}"),
        ("parallel.offload", _) => "offload".to_owned(),
        (key, value) => format!("{} {value}", key.trim_start_matches("parallel.")),
    });
    words.collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(set: &[&str], workers: usize, on_gpus: bool) -> Vec<(String, bool)> {
        let set: Vec<String> = set.iter().map(|&set| set.to_owned()).collect();
        let recipe = Recipe::load("gpt", &set).unwrap();
        ways(&recipe, workers, on_gpus).0.into_iter().map(|way| (way.name, way.asked)).collect()
    }

    #[test]
    fn the_way_that_was_asked_for_is_marked_among_the_others_or_comes_before_them() {
        let plain = named(&[], 8, true);
        assert_eq!((plain[0].clone(), plain.len()), (("ddp".to_owned(), true), 6));
        let sharded = named(&["parallel.strategy=fsdp"], 8, true);
        assert_eq!(
            sharded.iter().filter(|way| way.1).collect::<Vec<_>>(),
            [&("fsdp, zero 3".to_owned(), true)]
        );
        let own = named(&["parallel.recompute=cheap"], 8, true);
        assert_eq!((own[0].clone(), own.len()), (("as asked".to_owned(), true), 7));
        assert!(own[1..].iter().all(|way| !way.1));
        assert_eq!(named(&[], 8, false), [("as asked".to_owned(), true)]);
        assert_eq!(named(&["parallel.tensor=2"], 8, true), [("as asked".to_owned(), true)]);
        assert_eq!(named(&[], 1, true)[0], ("ddp".to_owned(), true));
    }
}
