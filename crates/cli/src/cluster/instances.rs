//! What is known of types of instances, as far as a configuration depends on it.

/// Families with the sizes that have an Elastic Fabric Adapter.
const WITH_EFA: &[(&str, &[&str])] = &[
    ("c5n", &["9xlarge", "18xlarge", "metal"]),
    ("g4dn", &["8xlarge", "12xlarge", "16xlarge", "metal"]),
    ("g5", &["8xlarge", "12xlarge", "16xlarge", "24xlarge", "48xlarge"]),
    ("g6", &["8xlarge", "12xlarge", "16xlarge", "24xlarge", "48xlarge"]),
    ("g6e", &["8xlarge", "12xlarge", "16xlarge", "24xlarge", "48xlarge"]),
    ("hpc6a", &["48xlarge"]),
    ("hpc6id", &["32xlarge"]),
    ("p3dn", &["24xlarge"]),
    ("p4d", &["24xlarge"]),
    ("p4de", &["24xlarge"]),
    ("p5", &["48xlarge"]),
    ("p5e", &["48xlarge"]),
    ("p5en", &["48xlarge"]),
];

/// Families with the GPUs of each size.
const GPUS: &[(&str, &[(&str, u32)])] = &[
    (
        "g4dn",
        &[
            ("12xlarge", 4),
            ("metal", 8),
            ("xlarge", 1),
            ("2xlarge", 1),
            ("4xlarge", 1),
            ("8xlarge", 1),
            ("16xlarge", 1),
        ],
    ),
    (
        "g5",
        &[
            ("12xlarge", 4),
            ("24xlarge", 4),
            ("48xlarge", 8),
            ("xlarge", 1),
            ("2xlarge", 1),
            ("4xlarge", 1),
            ("8xlarge", 1),
            ("16xlarge", 1),
        ],
    ),
    ("p3", &[("2xlarge", 1), ("8xlarge", 4), ("16xlarge", 8)]),
    ("p3dn", &[("24xlarge", 8)]),
    ("p4d", &[("24xlarge", 8)]),
    ("p4de", &[("24xlarge", 8)]),
    ("p5", &[("48xlarge", 8)]),
    ("p5e", &[("48xlarge", 8)]),
    ("p5en", &[("48xlarge", 8)]),
];

/// Whether a type has an Elastic Fabric Adapter; none where its family isn't known here.
pub(super) fn has_efa(instance: &str) -> Option<bool> {
    let (family, size) = instance.split_once('.')?;
    let (_, sizes) = WITH_EFA.iter().find(|(known, _)| *known == family)?;
    Some(sizes.contains(&size))
}

/// The GPUs of a type; none where it isn't known here.
pub(super) fn gpus(instance: &str) -> Option<u32> {
    let (family, size) = instance.split_once('.')?;
    let (_, sizes) = GPUS.iter().find(|(known, _)| *known == family)?;
    sizes.iter().find(|(known, _)| *known == size).map(|(_, gpus)| *gpus)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn types_are_known_by_family_and_size() {
        assert_eq!(
            (has_efa("g4dn.metal"), has_efa("g4dn.xlarge"), has_efa("m6i.large")),
            (Some(true), Some(false), None)
        );
        assert_eq!(
            (gpus("g4dn.metal"), gpus("p5.48xlarge"), gpus("c5n.18xlarge"), gpus("nonsense")),
            (Some(8), Some(8), None, None)
        );
    }
}
