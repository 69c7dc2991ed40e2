//! Ending before the machine is taken away: when that is to be, where it is known ahead, and the exit code that says so.

use crate::env::names;
use crate::error::Error;
use crate::slurm;
use std::time::{Duration, SystemTime};

/// The exit code of a worker, or a launcher, that has ended before its work was done, has kept it, and wants to be started again
/// later: sysexits' EX_TEMPFAIL.
pub const DRAINED: u8 = 75;

/// When the time of the run is up: by `PHALANX_END_TIME`, else by what Slurm says of the job. None where nobody says so, and where
/// `PHALANX_END_TIME` is 0.
///
/// Slurm before 23.02 tells its jobs no end, so `squeue` is asked, if `asks` says so, and once.
pub fn end_time(get: impl Fn(&str) -> Option<String>, asks: bool) -> Result<Option<SystemTime>, Error> {
    end_time_by(get, SystemTime::now(), |job| if asks { slurm::time_left(job) } else { None })
}

/// When the launcher was started that started this worker; none where that doesn't tell.
pub fn start_time(get: impl Fn(&str) -> Option<String>) -> Option<SystemTime> {
    let seconds = get(names::START_TIME)?.parse().ok()?;
    SystemTime::UNIX_EPOCH.checked_add(Duration::from_secs(seconds))
}

fn end_time_by(
    get: impl Fn(&str) -> Option<String>,
    now: SystemTime,
    ask: impl FnOnce(&str) -> Option<Duration>,
) -> Result<Option<SystemTime>, Error> {
    let seconds = |name: &'static str| -> Result<Option<u64>, Error> {
        let Some(value) = get(name).filter(|value| !value.is_empty()) else { return Ok(None) };
        let want = "must be seconds since 1970, as `date +%s` prints them".into();
        value.parse().map(Some).map_err(|_| Error::Variable { name, value, want })
    };
    let time = |seconds| SystemTime::UNIX_EPOCH.checked_add(Duration::from_secs(seconds));
    if let Some(own) = seconds(names::END_TIME)? {
        return Ok(time(own).filter(|_| own > 0));
    }
    let told = match seconds("SLURM_JOB_END_TIME")? {
        Some(told) => time(told),
        None => job(&get).and_then(|job| ask(&job)).and_then(|left| now.checked_add(left)),
    };
    // What runs after the end of a job has its variables from a shell that has outlived it.
    Ok(told.filter(|end| *end > now))
}

/// What Slurm knows this job by. One task of an array has the array's number as its own, under which all are told.
fn job(get: &impl Fn(&str) -> Option<String>) -> Option<String> {
    match (get("SLURM_ARRAY_JOB_ID"), get("SLURM_ARRAY_TASK_ID")) {
        (Some(array), Some(task)) => Some(format!("{array}_{task}")),
        _ => get("SLURM_JOB_ID"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_is_the_one_that_was_set_or_else_slurms() {
        let time = |seconds| SystemTime::UNIX_EPOCH + Duration::from_secs(seconds);
        let check = |variables: &[(&str, &str)], left: Option<u64>, want: Option<u64>| {
            let get =
                |name: &str| variables.iter().find(|(n, _)| *n == name).map(|(_, value)| value.to_string());
            let end = end_time_by(get, time(1000), |_| left.map(Duration::from_secs)).unwrap();
            assert_eq!(end, want.map(time), "{variables:?}");
        };
        let (own, end, job_id) = ("PHALANX_END_TIME", "SLURM_JOB_END_TIME", "SLURM_JOB_ID");
        check(&[], Some(60), None);
        check(&[(own, "1500"), (end, "1200"), (job_id, "7")], Some(60), Some(1500));
        // One that is past is a run's whose time is up, and not an old shell's.
        check(&[(own, "900")], None, Some(900));
        let told = |variables: &[(&str, &str)]| {
            job(&|name: &str| variables.iter().find(|(n, _)| *n == name).map(|(_, value)| value.to_string()))
        };
        assert_eq!(told(&[(job_id, "7")]).as_deref(), Some("7"));
        let array = [(job_id, "7"), ("SLURM_ARRAY_JOB_ID", "7"), ("SLURM_ARRAY_TASK_ID", "15")];
        assert_eq!(told(&array).as_deref(), Some("7_15"));
        check(&[(own, "0"), (end, "1200")], None, None);
        check(&[(end, "1200"), (job_id, "7")], Some(60), Some(1200));
        check(&[(end, "900"), (job_id, "7")], Some(60), None);
        check(&[(job_id, "7")], Some(60), Some(1060));
        check(&[(job_id, "7")], None, None);
        let wrong = |name: &str| (name == own).then(|| "soon".to_owned());
        let error = end_time(wrong, false).unwrap_err().to_string();
        assert!(error.contains("PHALANX_END_TIME is \"soon\": must be seconds since 1970"), "{error}");
    }
}
