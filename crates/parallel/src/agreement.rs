//! Whether all ranks run the same model: found before the first step, not as a hang or as nonsense in the middle of one.

use crate::error::Error;
use phalanx_comm::{Group, Rank};
use phalanx_nn::Parameters;
use phalanx_tensor::Layout;

/// The most bytes of a description that ranks tell each other when they differ: the length comes from outside.
const LONGEST: u64 = 1 << 20;

/// Fails, on every rank with the same words, unless the models of all ranks have the same parameters and buffers: the same
/// names and shapes in the same order. Names the first difference to rank 0.
pub(crate) fn same_model(group: &Group, parameters: &Parameters) -> Result<(), Error> {
    let Some((rank, first, other)) = first_that_differs(group, &description(parameters))? else {
        return Ok(());
    };
    let (ours, theirs) = first_difference(&first, &other);
    Err(Error::DifferentModels { rank, theirs, ours })
}

/// The first rank whose text isn't that of rank 0, with rank 0's text and its own, or as much of them as a MiB; the same on all ranks,
/// which all have to ask.
pub fn first_that_differs(group: &Group, text: &str) -> Result<Option<(u32, String, String)>, Error> {
    let own = [digest(text.as_bytes()), text.len() as u64];
    let mut all = vec![0; 2 * group.world_size()];
    group.all_gather(&own, &mut all)?;
    let all = all.as_chunks::<2>().0;
    let Some(rank) = all.iter().position(|other| *other != all[0]) else { return Ok(None) };
    // All ranks see the difference, so all take part in telling it.
    let told = |from: usize| -> Result<String, Error> {
        let mut bytes = if group.rank().index() == from { text.as_bytes().to_vec() } else { Vec::new() };
        bytes.resize(all[from][1].min(LONGEST) as usize, 0);
        group.broadcast(&mut bytes, Rank(from as u32))?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    };
    Ok(Some((rank as u32, told(0)?, told(rank)?)))
}

/// A line a parameter or buffer.
fn description(parameters: &Parameters) -> String {
    let line = |(i, name): (usize, &String), layout: &Layout, role: &str| {
        format!("{role}{name} of shape {}\n", layout.shape(i))
    };
    let learned = parameters.names().iter().enumerate().map(|(i, name)| {
        line((i, name), parameters.layout(), if parameters.is_frozen(i) { "frozen " } else { "" })
    });
    let kept = parameters.buffer_names().iter().enumerate();
    learned.chain(kept.map(|part| line(part, parameters.buffers().layout(), "buffer "))).collect()
}

/// The first lines in which two descriptions differ; what stands for the end is how many lines there are.
fn first_difference(ours: &str, theirs: &str) -> (String, String) {
    let (ours, theirs): (Vec<&str>, Vec<&str>) = (ours.lines().collect(), theirs.lines().collect());
    let same = ours.iter().zip(&theirs).take_while(|(a, b)| a == b).count();
    let line = |lines: &[&str]| match lines.get(same) {
        Some(line) => (*line).to_owned(),
        None => format!("only {} parameters and buffers", lines.len()),
    };
    (line(&ours), line(&theirs))
}

/// FNV-1a, 64 bits: a fingerprint, not a proof.
fn digest(bytes: &[u8]) -> u64 {
    bytes
        .iter()
        .fold(0xcbf2_9ce4_8422_2325, |hash, &byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

/// What every rank of a group says, by rank: on the first, on others nothing that means anything.
pub(crate) fn told_to_first(group: &Group, mut own: Vec<u8>) -> Result<Vec<Vec<u8>>, Error> {
    let (n, is_first) = (group.world_size(), group.rank() == Rank(0));
    let mut lengths = vec![0; n];
    group.all_gather(&[own.len() as u64], &mut lengths)?;
    // As long as the longest.
    let longest = lengths.iter().copied().max().unwrap_or(0) as usize;
    own.resize(longest, 0);
    let mut all = vec![0; if is_first { n * longest } else { 0 }];
    group.gather(&own, &mut all, Rank(0))?;
    let said = |(rank, length): (usize, u64)| all[rank * longest..][..length as usize].to_vec();
    Ok(if is_first { lengths.into_iter().enumerate().map(said).collect() } else { Vec::new() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use phalanx_nn::Linear;
    use phalanx_tensor::Device;

    #[test]
    fn the_first_difference_is_told_from_both_sides() {
        let check = |ours: &str, theirs: &str, want: (&str, &str)| {
            let (a, b) = first_difference(ours, theirs);
            assert_eq!((a.as_str(), b.as_str()), want);
        };
        check("a\nb\n", "a\nc\n", ("b", "c"));
        check("a\n", "a\nb\n", ("only 1 parameters and buffers", "b"));
        check("", "a\n", ("only 0 parameters and buffers", "a"));
        // Cut at the longest description, two models may look alike.
        check("a\n", "a\n", ("only 1 parameters and buffers", "only 1 parameters and buffers"));
    }

    /// On each rank with the same words, and as soon as all have met.
    #[test]
    fn two_models_in_one_group_are_told_apart() {
        std::thread::scope(|scope| {
            for group in Group::threads(3) {
                scope.spawn(move || {
                    let outputs = if group.rank() == Rank(2) { 5 } else { 4 };
                    let mut model = Linear::new(3, outputs);
                    let parameters = Parameters::build(&mut model, &Device::cpu(1), 0);
                    let error = same_model(&group, &parameters).unwrap_err().to_string();
                    let words = "the ranks have different models: rank 2 has weight of shape [5, 3] where rank 0 has weight of shape [4, 3]";
                    assert!(error.starts_with(words), "{error}");
                });
            }
        });
    }

    #[test]
    fn the_digest_is_fnv_1a() {
        // Published test values of FNV-1a.
        assert_eq!(digest(b""), 0xcbf2_9ce4_8422_2325);
        assert_eq!(digest(b"a"), 0xaf63_dc4c_8601_ec8c);
        assert_eq!(digest(b"foobar"), 0x8594_4171_f739_67e8);
    }
}
