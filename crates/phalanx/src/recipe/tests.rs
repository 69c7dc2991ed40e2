use super::*;
use crate::checkpoint::Every;
use crate::{OnNan, Watch};
use phalanx_data::Target;
use phalanx_nn::optim::{AdamW, Group, Members, Optimizer, Rule, Sgd};
use phalanx_nn::{Anneal, Curve, Loss, OneCycle, Plateau, Schedule, Unit, Warmup, WeightedCrossEntropy};
use phalanx_parallel::{BetweenGpus, Compress};
use std::collections::HashSet;
use std::fs;
use std::time::Duration;

fn set(recipe: &str, assignments: &[&str]) -> Result<Recipe, String> {
    let mut recipe = Recipe::load(recipe, &[]).unwrap();
    recipe.set(assignments.iter().copied()).map_err(|error| error.to_string())?;
    Ok(recipe)
}

#[test]
fn every_built_in_recipe_is_whole_and_printed_and_read_back() {
    for (name, _) in BUILT_IN {
        let recipe = Recipe::load(name, &[]).unwrap();
        assert!(!recipe.about.is_empty() && !recipe.about.contains('\n'), "{name}: {}", recipe.about);
        assert_eq!(Recipe::parse(name, "printed", &recipe.to_toml()).unwrap(), recipe, "{name}");
        recipe.model().unwrap();
        recipe.trainer().unwrap();
        Optimizer::new(recipe.rule().unwrap()).unwrap();
        assert!(phalanx_data::listing(&recipe.data.name).is_ok(), "{name}");
    }
}

#[test]
fn every_key_can_be_set_where_it_has_a_meaning() {
    for key in KEYS {
        let value = match key.kind {
            Kind::Flag => "true",
            Kind::Count(_) | Kind::Between(..) => "3",
            Kind::Number | Kind::NotNegative | Kind::Positive => "2.5",
            Kind::Share => "0.25",
            Kind::Shares => "[0.8, 0.9]",
            Kind::Fraction => "1",
            Kind::NotNegatives(4) => "[0, 0.4, 0.25, 0.5]",
            Kind::NotNegatives(_) | Kind::Positives(_) => "[0.5, 0.25, 1]",
            Kind::OneOf(words) => words[words.len() - 1],
            Kind::SomeOf(words) => words[0],
            Kind::Names => "[\"conv1.*\", fc1.bias]",
        };
        let (chooser, _) = key.chooser();
        let value = match key.path {
            "model.head" => "12",
            // As many as there are devices; and one under the usual schedule.
            "parallel.cut" => "[1, 3]",
            "parallel.chunks" => "1",
            "parallel.recompute_blocks" => "[0, 2]",
            // The width of the recipe falls into so many heads, and this one into its heads.
            "model.heads" => "8",
            "model.width" => "12",
            // What evaluations of the recipe tell unasked.
            "train.watch" => "accuracy",
            _ => value,
        };
        let mut assignments = vec![format!("{}={value}", key.path)];
        assignments.extend(key.only_for.first().map(|owner| format!("{}.{chooser}={owner}", key.section())));
        // What has a meaning beside another key alone.
        assignments.extend(match key.path {
            "parallel.sequence" => Some("parallel.tensor=2".to_owned()),
            "train.checkpoint" => Some("parallel.strategy=fsdp".to_owned()),
            "parallel.recompute_blocks" => Some("parallel.recompute=blocks".to_owned()),
            "schedule.warmup_from" => Some("schedule.warmup=1".to_owned()),
            "data.crop_border" => Some("data.crop_padding=3".to_owned()),
            _ => None,
        });
        // The dataset of points and the images' keys exclude each other, so no other key is at stake here.
        let assignments: Vec<&str> = assignments.iter().map(String::as_str).collect();
        // A recipe whose other parts go with the value.
        let recipe = match key.path {
            "data.targets" => "mnist-autoencoder",
            "data.name" | "train.loss" => "linear-regression",
            "data.augment" => "cifar10-resnet18",
            "model.name" | "parallel.tensor" | "parallel.sequence" | "parallel.context" => "gpt",
            _ if key.only_for.contains(&"gpt") && key.path != "model.dropout" => "gpt",
            _ if key.only_for.iter().any(|owner| ["cifar10", "resnet18"].contains(owner))
                && key.path != "data.pixels" =>
            {
                "cifar10-resnet18"
            }
            _ => "mnist",
        };
        let recipe = set(recipe, &assignments).unwrap_or_else(|error| panic!("{}: {error}", key.path));
        let printed: Table = recipe.to_toml().parse().unwrap();
        let kept = &printed[key.section()][key.leaf()];
        assert_eq!(*kept, key.parse("test", value).unwrap(), "{}", key.path);
    }
    let paths: HashSet<&str> = KEYS.iter().map(|key| key.path).collect();
    assert_eq!(paths.len(), KEYS.len());
}

#[test]
fn the_page_of_recipes_has_all_keys() {
    let row = |key: &Key| {
        let owners = key.owners().unwrap_or_default();
        format!("| `{}` | {} | {} | {owners} |\n", key.path, key.about, key.kind)
    };
    let table: String = KEYS.iter().map(row).collect();
    let page = include_str!("../../../../docs/recipes.md");
    assert!(page.contains(&format!("|---|---|---|---|\n{table}")), "its table must be\n{table}");
}

#[test]
fn the_table_of_keys_and_the_catalog_of_data_agree() {
    let Kind::OneOf(names) = KEYS.iter().find(|key| key.path == "data.name").unwrap().kind else {
        panic!("data.name is a choice")
    };
    let listed: HashSet<&str> = phalanx_data::catalog().iter().map(|listing| listing.name).collect();
    assert_eq!(names.iter().copied().collect::<HashSet<_>>(), listed);
}

#[test]
fn words_become_parts() {
    let recipe = Recipe::load("mnist", &[]).unwrap();
    assert_eq!(recipe.rule().unwrap(), Rule::Sgd(Sgd { momentum: 0.5, ..Sgd::new(0.01) }));
    assert_eq!((recipe.loss(), recipe.schedule()), (Loss::Nll, Schedule::default()));
    let hpc = Recipe::load("mnist-hpc", &[]).unwrap();
    assert_eq!(hpc.rule().unwrap(), Rule::Adadelta(phalanx_nn::optim::Adadelta::default()));
    assert_eq!(hpc.schedule(), Curve::Step { size: 1.0, gamma: 0.7 }.into());
    let recipe = set("mnist", &["train.loss=cross-entropy", "train.label_smoothing=0.1"]).unwrap();
    assert_eq!(recipe.loss(), Loss::CrossEntropy { label_smoothing: 0.1 });
    let whole = ["train.class_weights=[1, 0.5, 4]", "model.head=12", "data.mixup=0", "parallel.tensor=1"];
    let recipe = set("cifar10-resnet18", &whole).unwrap();
    let Loss::WeightedCrossEntropy(WeightedCrossEntropy { weights, ignored: None, .. }) = recipe.loss()
    else {
        panic!("{:?}", recipe.loss())
    };
    assert_eq!(weights, [1.0, 0.5, 4.0]);
    let error = recipe.check_classes(Target::Classes(10)).unwrap_err().to_string();
    assert!(
        error.contains("train.class_weights must be 12 numbers") && error.contains("got: 3 of them"),
        "{error}"
    );
    let trainer = set("mnist", &["parallel.bucket_mb=0.5", "train.seed=7"]).unwrap().trainer().unwrap();
    assert_eq!((trainer.ddp.bucket_bytes, trainer.seed), (1 << 19, 7));
    let shards = |set: Result<Recipe, String>| set.unwrap().trainer().unwrap().logical_shards;
    assert_eq!(shards(set("mnist", &["parallel.logical_shards=4"])), Some(4));
    assert_eq!(shards(set("mnist", &[])), None);
    let power = Compress::PowerSgd { rank: 1, start_step: 1000 };
    let words = [
        ("none", Compress::Nothing),
        ("bf16", Compress::Bf16),
        ("fp16", Compress::Fp16),
        ("powersgd", power),
    ];
    for (word, want) in words {
        let word = format!("parallel.compress={word}");
        assert_eq!(set("mnist", &[&word]).unwrap().trainer().unwrap().ddp.compress, want);
    }
    for (word, want) in
        [("best", BetweenGpus::Best), ("nccl", BetweenGpus::Nccl), ("host", BetweenGpus::Host)]
    {
        let word = format!("parallel.between_gpus={word}");
        assert_eq!(set("mnist", &[&word]).unwrap().trainer().unwrap().ddp.between_gpus, want);
    }
    for (idle, beside) in [
        ("parallel.bucket_mb=3", "parallel.strategy=fsdp"),
        ("parallel.first_bucket_mb=3", "parallel.logical_shards=4"),
        ("parallel.find_unused=true", "parallel.strategy=fsdp"),
    ] {
        let refused = set("mnist", &[idle, beside]).unwrap_err();
        assert!(refused.contains(idle.split('=').next().unwrap()), "{refused}");
    }
    for beside in ["parallel.compress=bf16", "parallel.logical_shards=4"] {
        let refused = set("mnist", &["parallel.between_gpus=nccl", beside]).unwrap_err();
        assert!(refused.contains("best or host beside"), "{refused}");
    }
    let power = ["parallel.compress=powersgd", "parallel.rank=4", "parallel.start_step=10"];
    let power = set("mnist", &power).unwrap().trainer().unwrap().ddp.compress;
    assert_eq!(power, Compress::PowerSgd { rank: 4, start_step: 10 });
    let steps = ["train.accumulate=4", "train.drop_last=true", "train.clip_norm=2", "train.on_nan=stop"];
    let trainer = set("mnist", &steps).unwrap().trainer().unwrap();
    assert!(trainer.drop_last && !trainer.graphs);
    assert!(set("mnist", &["train.graphs=true"]).unwrap().trainer().unwrap().graphs);
    assert!(!trainer.search && set("mnist", &["train.search=true"]).unwrap().trainer().unwrap().search);
    assert_eq!((trainer.accumulate, trainer.clip.norm, trainer.clip.value), (4, Some(2.0), None));
    assert_eq!((trainer.on_nan, trainer.groups.len()), (OnNan::Stop, 0));
    let groups = set("mnist", &["optimizer.decay_norms_and_biases=false"]).unwrap().trainer().unwrap().groups;
    assert_eq!(groups, [Group { of: Members::NormsAndBiases, lr: 1.0, weight_decay: 0.0 }]);
    let judging = ["train.ema=0.99", "train.watch=accuracy", "train.patience=4"];
    let trainer = set("mnist", &judging).unwrap().trainer().unwrap();
    assert_eq!((trainer.ema, trainer.watch, trainer.patience), (Some(0.99), Watch::Accuracy, Some(4)));
    assert!(trainer.metrics.is_empty());
    let judging = ["train.metrics=[balanced_accuracy, macro_f1]", "train.watch=macro_f1"];
    for (recipe, classes) in [("mnist", 10), ("cifar10-resnet18", 12)] {
        let head = ["model.head=12"].into_iter().filter(|_| classes == 12);
        let sets: Vec<&str> = judging.into_iter().chain(head).collect();
        let trainer = set(recipe, &sets).unwrap().trainer().unwrap();
        let told: Vec<(&str, usize)> = trainer.metrics.iter().map(|m| (m.name(), m.n_sums())).collect();
        assert_eq!(told, [("balanced_accuracy", 3 * classes), ("macro_f1", 3 * classes)]);
        assert_eq!(trainer.watch, Watch::Metric("macro_f1".into()));
    }
    let errors = ["train.metrics=[mean_absolute_error]", "train.watch=mean_absolute_error"];
    let trainer = set("linear-regression", &errors).unwrap().trainer().unwrap();
    assert_eq!(trainer.metrics[0].name(), "mean_absolute_error");
}

#[test]
fn checkpoints_are_taken_as_the_keys_say() {
    let check = |assignments: &[&str], every: Every, keep: usize| {
        let recipe = set("mnist", assignments).unwrap();
        let config = recipe.checkpoint("run/checkpoints".into());
        assert_eq!((config.every, config.keep, config.resume), (every, keep, false), "{assignments:?}");
        assert_eq!(config.recipe, Some(recipe.to_toml()));
    };
    let seconds = |seconds| Every::Time(Duration::from_secs(seconds));
    check(&[], seconds(60), 2);
    check(&["train.checkpoint_minutes=0.5", "train.keep=5"], seconds(30), 5);
    check(&["train.checkpoint_minutes=1e300"], Every::Time(Duration::MAX), 2);
    check(&["train.checkpoint_every=7", "train.checkpoint_minutes=3"], Every::Steps(7), 2);
}

#[test]
fn schedules_are_what_their_keys_say() {
    let schedule = |assignments: &[&str]| {
        let recipe = set("mnist", assignments).unwrap();
        (recipe.schedule(), recipe.plateau())
    };
    let of = |curve: Curve| (curve.into(), None);
    assert_eq!(schedule(&["schedule.name=step"]), of(Curve::Step { size: 1.0, gamma: 0.1 }));
    assert_eq!(
        schedule(&["schedule.name=multi-step", "schedule.milestones=[30, 60.5]", "schedule.gamma=0.2"]),
        of(Curve::MultiStep { milestones: vec![30.0, 60.5], gamma: 0.2 })
    );
    assert_eq!(
        schedule(&["schedule.name=cosine", "schedule.floor=0.1"]),
        of(Curve::Cosine { floor: 0.1, epochs: None })
    );
    assert_eq!(
        schedule(&["schedule.name=linear", "schedule.floor=0.1", "schedule.epochs=3"]),
        of(Curve::Linear { floor: 0.1, epochs: Some(3.0) })
    );
    let warmup = Warmup { steps: 400, from: 0.0, ..Warmup::default() };
    assert_eq!(
        schedule(&["schedule.name=inverse-sqrt", "schedule.warmup_steps=400", "schedule.warmup_from=0"]),
        (Schedule { warmup, ..Schedule::from(Curve::InverseSqrt) }, None)
    );
    assert_eq!(schedule(&["schedule.name=one-cycle"]), of(Curve::OneCycle(OneCycle::default())));
    let (epochs, anneal) = (Some(2.0), Anneal::Linear);
    assert_eq!(
        schedule(&[
            "schedule.name=one-cycle",
            "schedule.anneal=linear",
            "schedule.epochs=2",
            "schedule.div_factor=9"
        ]),
        of(Curve::OneCycle(OneCycle { epochs, anneal, div_factor: 9.0, ..OneCycle::default() }))
    );
    let warmup = Warmup { epochs: 0.5, ..Warmup::default() };
    let warm = Schedule { by: Unit::Epoch, warmup, ..Schedule::default() };
    assert_eq!(
        schedule(&[
            "schedule.name=plateau",
            "schedule.patience=3",
            "schedule.warmup=0.5",
            "schedule.by=epoch"
        ]),
        (warm, Some(Plateau { patience: 3, ..Plateau::default() }))
    );
    let unnamed = "[model]\nname = \"mnist\"\n[optimizer]\nname = \"sgd\"\n[schedule]\nwarmup = 1\n[data]\nname = \"mnist\"\n[train]\nloss = \"nll\"\n";
    assert_eq!(Recipe::parse("r", "r.toml", unnamed).unwrap().schedule().warmup.epochs, 1.0);
}

#[test]
fn another_optimizer_forgets_the_settings_of_the_former_in_any_order() {
    for assignments in
        [["optimizer.name=adamw", "optimizer.eps=1e-6"], ["optimizer.eps=1e-6", "optimizer.name=adamw"]]
    {
        let recipe = set("mnist", &assignments).unwrap();
        assert_eq!(recipe.rule().unwrap(), Rule::AdamW(AdamW { eps: 1e-6, ..AdamW::default() }));
    }
    let same = set("mnist", &["optimizer.name=sgd"]).unwrap();
    assert_eq!(
        same.rule().unwrap(),
        Recipe::load("mnist", &[]).unwrap().rule().unwrap(),
        "the same name forgets nothing"
    );
    let other = set("mnist", &["data.name=mnist-mini", "data.pixels=unit"]).unwrap();
    assert_eq!((other.data.name.as_str(), other.data.pixels.as_deref()), ("mnist-mini", Some("unit")));
}

#[test]
fn the_last_of_two_values_counts() {
    assert_eq!(set("mnist", &["train.epochs=3", "train.epochs=4"]).unwrap().train.epochs, 4);
}

#[test]
fn switching_augmentation_off_is_no_error() {
    let off = set("mnist", &["data.augment=false", "model.dropout=0"]).unwrap();
    assert_eq!(off.data.augment, Some(false));
    let view = |set: &[&str]| super::tests::set("cifar10-fast", set).unwrap().view().treatment;
    let cifar = |set: &[&str]| {
        let usual = phalanx_data::Normalise::CIFAR10;
        view(set).pipelines(Some([32, 32]), usual).unwrap()
    };
    let off = cifar(&["data.augment=false"]);
    assert_eq!(off.train, off.test);
    assert!(off.train.steps.is_empty() && off.train.cutout == 0);
    let on = cifar(&[]);
    assert_eq!((on.train.steps.len(), on.train.cutout, on.test), (2, 8, off.test));
}

#[test]
fn what_is_said_of_images_becomes_a_treatment() {
    use phalanx_data::{Augment, BadImages, Border, Jitter, Normalise, Treatment};
    let assignments = [
        "data.size=24",
        "data.resize=28",
        "data.flip=true",
        "data.crop_padding=2",
        "data.crop_border=reflect",
        "data.crop_area=0.3",
        "data.jitter=[0.1,0.2,0.3,0.4]",
        "data.cutout=5",
        "data.mixup=0.2",
        "data.mean=[0.1,0.2,0.3]",
        "data.std=[1,2,3]",
        "data.skip_bad=true",
        "train.seed=9",
        "data.threads=3",
    ];
    let recipe = set("cifar10-resnet18-224", &assignments).unwrap();
    let expected = Treatment {
        size: Some(24),
        resize: Some(28),
        crop_padding: 2,
        crop_border: Border::Reflect,
        crop_area: Some(0.3),
        flip: true,
        jitter: Jitter { brightness: 0.1, contrast: 0.2, saturation: 0.3, hue: 0.4 },
        cutout: 5,
        mixup: 0.2,
        normalise: Some(Normalise { mean: [0.1, 0.2, 0.3], std: [1.0, 2.0, 3.0] }),
        augment: Augment::On,
        seed: 9,
        bad: BadImages::Replace,
    };
    assert_eq!(recipe.view().treatment, expected);
    assert_eq!(recipe.trainer().unwrap().loader.threads, 3);
    assert_eq!(Recipe::parse("r", "r", &recipe.to_toml()).unwrap().view(), recipe.view());
    let folder = ["data.name=image-folder", "model.head=3", "data.size=64"];
    assert_eq!(set("cifar10-resnet18", &folder).unwrap().trainer().unwrap().loader.threads, 2);
}

#[test]
fn wrong_settings_say_what_would_be_right() {
    let rows: &[(&str, &[&str])] = &[
        ("optimizer.lr", &["KEY=VALUE", "got: optimizer.lr"]),
        (
            "optimizer.learning_rate=1",
            &["--set: no recipe has the key: optimizer.learning_rate", "hint: did you mean optimizer."],
        ),
        ("optimiser.lr=1", &["did you mean optimizer.lr?"]),
        ("lr=1", &["did you mean optimizer.lr?"]),
        ("train.epoch=1", &["did you mean train.epochs?"]),
        ("zzz=1", &["hint: `phalanx train --keys`"]),
        ("train.epochs=many", &["train.epochs must be a whole number of at least 1, got: many"]),
        (
            "model.freeze=[fc.*,]",
            &["model.freeze must be a list of names, as in [\"conv1.*\", \"*.bias\"], got: [\"fc.*\", \"\"]"],
        ),
        (
            "schedule.name=multi-step",
            &["schedule.milestones must be given, as in [30, 60] epochs, got: nothing"],
        ),
        ("train.epochs=0", &["train.epochs must be a whole number of at least 1, got: 0"]),
        ("train.batch_size=-1", &["got: -1"]),
        ("train.batch_size=1.5", &["got: 1.5"]),
        ("optimizer.lr=fast", &["optimizer.lr must be a number of at least 0, got: fast"]),
        ("optimizer.lr=nan", &["got: nan"]),
        ("optimizer.lr=", &["got: "]),
        ("model.dropout=1", &["model.dropout must be a number from 0 to below 1, got: 1"]),
        ("optimizer.nesterov=yes", &["true or false", "got: yes"]),
        ("optimizer.name=adm", &["one of sgd, adam, adamw", "did you mean adam?"]),
        ("data.name=cifar", &["one of mnist, "]),
        ("data.augment=true", &["data.augment must be false, got: true"]),
        ("optimizer.betas=0.9", &["optimizer.betas must be two numbers from 0 to below 1, got: [0.9]"]),
        (
            "optimizer.betas=[0.9,0.99]",
            &[
                "optimizer.betas has no meaning for optimizer sgd, which takes: optimizer.name, optimizer.lr, optimizer.momentum",
            ],
        ),
        ("train.label_smoothing=0.1", &["no meaning for loss nll"]),
        ("train.accumulate=0", &["train.accumulate must be a whole number of at least 1, got: 0"]),
        ("train.clip_norm=0", &["train.clip_norm must be a number above 0, got: 0"]),
        ("train.on_nan=halt", &["one of loss, stop, ignore"]),
        ("parallel.compress=fp8", &["one of none, bf16, fp16, powersgd"]),
        (
            "parallel.rank=2",
            &[
                "parallel.rank has no meaning for compress none, which takes: parallel.strategy, parallel.recompute",
            ],
        ),
        ("parallel.rank=0", &["parallel.rank must be a whole number from 1"]),
        (
            "parallel.logical_shards=0",
            &["parallel.logical_shards must be a whole number from 1 to 65536, got: 0"],
        ),
        ("schedule.warmup_from=0.1", &["schedule.warmup must be given beside schedule.warmup_from"]),
        ("train.ema=1", &["train.ema must be a number from 0 to below 1, got: 1"]),
        ("train.patience=0", &["train.patience must be a whole number of at least 1, got: 0"]),
        ("train.keep=0", &["train.keep must be a whole number of at least 1, got: 0"]),
        ("train.checkpoint_minutes=0", &["train.checkpoint_minutes must be a number above 0, got: 0"]),
        ("train.watch=acuracy", &["one of loss, accuracy", "did you mean accuracy?"]),
        ("schedule.gamma=0.5", &["no meaning for schedule constant"]),
        ("data.flip=true", &["data.flip has no meaning for data mnist"]),
        ("model.head=3", &["model.head has no meaning for model mnist"]),
        (
            "schedule.milestones=[3, -1]",
            &["schedule.milestones must be a list of numbers above 0, as in [30, 60]"],
        ),
        ("schedule.name=cosin", &["one of constant, step, multi-step, cosine", "did you mean cosine?"]),
        ("schedule.by=batch", &["schedule.by must be one of step, epoch, got: \"batch\""]),
    ];
    for (assignment, parts) in rows {
        let error = set("mnist", &[assignment]).unwrap_err();
        assert!(parts.iter().all(|part| error.contains(part)), "{assignment}: {error}");
    }
}

#[test]
fn images_that_cannot_be_made_are_refused_at_once() {
    let rows: &[(&[&str], &[&str])] = &[
        (&["data.jitter=[0,0,0,0.6]"], &["a hue from 0 to 0.5"]),
        (&["data.jitter=[0.4]"], &["data.jitter must be 4 numbers of at least 0, got: [0.4]"]),
        (&["data.std=[1,0,1]"], &["data.std must be 3 numbers above 0"]),
        (&["data.mixup=2"], &["data.mixup must be a number from 0 to 1, got: 2"]),
        (
            &["train.class_weights=[1, 2]", "data.mixup=0.2"],
            &["data.mixup must be 0.0 beside train.class_weights, got: 0.2"],
        ),
        (
            &["train.class_weights=[1, 2]", "parallel.tensor=2"],
            &["parallel.tensor must be 1 beside train.class_weights, got: 2"],
        ),
        (&["data.name=image-folder"], &["model.head must be the number of class folders", "got: nothing"]),
        (&["model.head=9"], &["model.head must be at least 10, the classes of cifar10, got: 9"]),
        (&["train.loss=nll"], &["needs train.loss = cross-entropy"]),
        (
            &["data.pixels=unit", "data.mean=[0.5, 0.5, 0.5]"],
            &["data.pixels must be left out beside data.mean and data.std, got: unit"],
        ),
        (
            &["data.crop_border=reflect"],
            &["data.crop_padding must be a whole number beside data.crop_border, got: nothing"],
        ),
        (
            &["model.name=resnet9", "data.size=7"],
            &["data.size must be at least 8 for the model resnet9, got: 7x7"],
        ),
        (&["model.name=resnet9", "model.stem=small"], &["model.stem has no meaning for model resnet9"]),
    ];
    let sizes = set("cifar10-resnet18", &["data.name=image-folder", "model.head=2"]).unwrap_err();
    assert!(sizes.contains("different sizes") && sizes.contains("hint:"), "{sizes}");
    for (assignments, parts) in rows {
        let error = set("cifar10-resnet18-224", assignments).unwrap_err();
        assert!(parts.iter().all(|part| error.contains(part)), "{assignments:?}: {error}");
    }
}

#[test]
fn a_wrong_setting_changes_nothing() {
    let mut recipe = Recipe::load("mnist", &[]).unwrap();
    let before = recipe.clone();
    recipe.set(["train.epochs=3", "train.epochs=x"]).unwrap_err();
    assert_eq!(recipe, before);
}

#[test]
fn fields_that_a_program_has_changed_are_checked() {
    let mut recipe = Recipe::load("mnist", &[]).unwrap();
    recipe.train.batch_size = 0;
    let error = recipe.trainer().unwrap_err().to_string();
    assert_eq!(error, "mnist: train.batch_size must be a whole number of at least 1, got: 0");
    recipe.train.batch_size = 1;
    recipe.train.seed = u64::MAX;
    let error = recipe.rule().unwrap_err().to_string();
    assert_eq!(
        error,
        "mnist: train.seed must be a whole number of at most 9223372036854775807, got: 18446744073709551615"
    );
    recipe.train.seed = 1;
    recipe.parallel.devices = Some(usize::MAX);
    let error = recipe.check().unwrap_err().to_string();
    assert!(error.starts_with("mnist: parallel.devices must be a whole number of at most"), "{error}");
    let error = recipe.set(["train.epochs=3"]).unwrap_err().to_string();
    assert!(error.contains("parallel.devices"), "{error}");
    recipe.parallel.devices = None;
    recipe.model.name = "vgg".into();
    assert!(recipe.model().is_err());
}

#[test]
fn an_unknown_recipe_gets_the_nearest() {
    let error = |name: &str| Recipe::load(name, &[]).unwrap_err().to_string();
    assert!(error("minst").contains("did you mean mnist?"), "{}", error("minst"));
    assert!(error("mnist_mini").contains("did you mean mnist-mini?"));
    assert!(error("qqq").contains("phalanx train --list"));
    assert!(error("/no/such.toml").contains("cannot read the recipe /no/such.toml: No such file"));
}

#[test]
fn of_a_line_without_end_the_beginning_is_shown() {
    let error = Recipe::parse("r", "r.toml", &format!("model = {}", "[".repeat(100_000))).unwrap_err();
    let text = error.to_string();
    assert!(
        text.len() < 3000 && text.contains("[[[...") && text.contains("r.toml: not a TOML file"),
        "{text}"
    );
}

#[test]
fn files_are_held_to_the_same_keys() {
    const WHOLE: &str = "[model]\nname = \"linear-regression\"\n[optimizer]\nname = \"sgd\"\nlr = 1\n[data]\nname = \"linear-regression\"\n[train]\nloss = \"mse\"\n";
    let parse = |text: &str| Recipe::parse("r", "r.toml", text).map_err(|error| error.to_string());
    assert_eq!(parse(WHOLE).unwrap().rule().unwrap(), Rule::Sgd(Sgd::new(1.0)), "a whole number is a number");
    let rows = [
        ("model = [", "r.toml: not a TOML file"),
        ("model = 3", "r.toml: no recipe has the key: model"),
        ("[modle]\nname = 1", "did you mean model.name?"),
        ("about = 3", "no recipe has the key: about"),
        (
            &WHOLE.replace("lr = 1", "lr = \"1\""),
            "r.toml: optimizer.lr must be a number of at least 0, got: \"1\"",
        ),
        (&WHOLE.replace("lr = 1", "rl = 1"), "did you mean optimizer.lr?"),
        (&WHOLE.replace("loss = \"mse\"", ""), "the recipe lacks the key: train.loss"),
        (&WHOLE.replace("lr = 1", "rho = 0.9"), "optimizer.rho has no meaning for optimizer sgd"),
        (&format!("{WHOLE}[schedule]\ngamma = 0.5\n"), "schedule.gamma has no meaning for schedule constant"),
        ("", "the recipe lacks the key: model.name"),
    ];
    for (text, expected) in rows {
        let error = parse(text).unwrap_err();
        assert!(error.contains(expected), "{text}: {error}");
    }
}

#[test]
fn a_file_is_called_as_it_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("mine.toml");
    fs::write(&path, Recipe::load("mnist-mini", &[]).unwrap().to_toml()).unwrap();
    let recipe = Recipe::load(path.to_str().unwrap(), &[]).unwrap();
    assert_eq!((recipe.name.as_str(), recipe.data.name.as_str()), ("mine", "mnist-mini"));
}

/// Values of every type, right for some keys and wrong for the others.
const VALUES: &[&str] = &[
    "1",
    "0",
    "-1",
    "0.5",
    "1e999",
    "nan",
    "9223372036854775807",
    "true",
    "false",
    "\"sgd\"",
    "\"step\"",
    "\"mnist\"",
    "[]",
    "[0, 0.5]",
    "[[0.1], 0.1]",
    "{ a = 1 }",
    "1979-05-27",
];

/// A good recipe with any key set to any value is refused, or works.
#[test]
fn no_value_makes_it_panic() {
    for (_, recipe) in BUILT_IN {
        for (key, value) in KEYS.iter().flat_map(|key| VALUES.iter().map(move |value| (key, value))) {
            let Ok(mut value) = format!("v = {value}").parse::<Table>() else { continue };
            let mut table: Table = recipe.parse().unwrap();
            let section = table.entry(key.section()).or_insert_with(|| Value::Table(Table::new()));
            section.as_table_mut().unwrap().insert(key.leaf().to_owned(), value.remove("v").unwrap());
            if let Ok(recipe) = Recipe::parse("r", "r.toml", &table.to_string()) {
                recipe.model().unwrap();
                recipe.rule().unwrap();
                recipe.trainer().unwrap();
            }
        }
    }
}

proptest::proptest! {
    #[test]
    fn no_file_makes_it_panic(text in "\\PC{0,80}") {
        let _ = Recipe::parse("r", "r.toml", &text);
    }

    #[test]
    fn no_assignment_makes_it_panic(text in "\\PC{0,40}", key in 0..KEYS.len()) {
        let _ = set("mnist", &[&text]);
        let _ = set("mnist", &[&format!("{}={text}", KEYS[key].path)]);
    }
}

#[test]
fn parts_that_do_not_fit_are_refused_by_name() {
    for (recipe, set, words) in [
        ("mnist", "train.loss=mse", ["the model mnist needs train.loss = nll or cross-entropy", "got: mse"]),
        ("mnist", "data.targets=inputs", ["needs data.targets = own", "got: inputs"]),
        (
            "mnist-hpc",
            "data.name=linear-regression",
            ["needs data.name = mnist or", "got: linear-regression"],
        ),
        ("mnist-autoencoder", "data.targets=own", ["needs data.targets = inputs", "got: own"]),
        ("gpt", "data.name=mnist", ["needs data.name = text", "got: mnist"]),
        ("gpt", "model.heads=3", ["model.heads must be a divisor of model.width = 128", "got: 3"]),
        ("linear-regression", "train.watch=accuracy", ["needs train.watch = loss or", "got: accuracy"]),
        ("linear-regression", "train.metrics=[macro_f1]", ["some of mean_absolute_error", "got: macro_f1"]),
        ("gpt", "train.metrics=[macro_f1]", ["train.metrics must be left out for the model gpt", "macro_f1"]),
        ("gpt", "train.watch=macro_f1", ["needs train.watch = loss", "got: macro_f1"]),
        (
            "mnist",
            "train.watch=macro_f1",
            ["train.metrics must be a list with macro_f1 in it", "got: nothing"],
        ),
        (
            "mnist",
            "train.metrics=[macro_fl]",
            ["some of macro_f1, balanced_accuracy", "did you mean macro_f1?"],
        ),
        ("mnist", "train.metrics=[macro_f1, macro_f1]", ["each once", "got: "]),
        ("linear-regression", "data.name=mnist", ["needs data.name = linear-regression", "got: mnist"]),
    ] {
        let error = Recipe::load(recipe, &[set.to_owned()]).unwrap_err().to_string();
        // What to do is in a hint, or in what the value must be.
        let says_what_to_do = error.contains("hint:") || error.contains(" must be ");
        assert!(words.iter().all(|word| error.contains(word)) && says_what_to_do, "{error}");
    }
}

#[test]
fn what_a_strategy_of_several_devices_cannot_have_is_refused() {
    let check = |assignments: &[&str], want: &str| {
        let error = set("mnist", assignments).unwrap_err();
        assert_eq!(error, want);
    };
    let pipeline = "parallel.strategy=pipeline";
    check(
        &[pipeline, "parallel.cut=[1, 2, 1]"],
        "--set: parallel.cut must be 2 whole numbers, the blocks of each stage, got: [1, 2, 1]",
    );
    check(
        &[pipeline, "parallel.schedule=interleaved", "parallel.devices=3"],
        "--set: parallel.micro_batches must be a multiple of 3, the devices, under interleaved, got: 4",
    );
    check(
        &[pipeline, "parallel.chunks=2"],
        "--set: parallel.chunks must be 1 under the schedule 1f1b, got: 2",
    );
    check(
        &["parallel.recompute=cheap", "parallel.recompute_blocks=[0, 2]"],
        "--set: parallel.recompute_blocks must be two rising whole numbers beside parallel.recompute=blocks, got: [0, 2]",
    );
    check(
        &["parallel.strategy=dp", "parallel.sync_batch_norm=true"],
        "--set: parallel.sync_batch_norm must be false under the strategy dp, got: true",
    );
    check(
        &[pipeline, "parallel.logical_shards=2"],
        "--set: parallel.logical_shards must be left out under the strategy pipeline, got: 2",
    );
    check(
        &["parallel.strategy=fsdp", "parallel.zero=2", "parallel.offload=true"],
        "--set: parallel.offload must be false where fsdp doesn't share out parameters, or parallel.zero=3, got: true",
    );
    assert!(set("mnist", &["parallel.strategy=fsdp", "parallel.offload=true"]).is_ok());
    let error = set("mnist", &["parallel.micro_batches=4"]).unwrap_err();
    let words = "parallel.micro_batches must be left out without --strategy pipeline or parallel.pipeline";
    assert!(error.contains(words), "{error}");
    let error = set("mnist", &["parallel.strategy=pipelines"]).unwrap_err();
    assert!(error.ends_with("hint: did you mean pipeline?"), "{error}");
}
