//! What GPUs are busy with.

use crate::stream::fake;
use phalanx_cuda::nvml::{Nvml, Part, Process, State, Used};
use phalanx_cuda::{Driver, Error};
use phalanx_fake_cuda::FakeCuda;

const MIB: u64 = 1 << 20;

fn open(fake: &FakeCuda) -> Nvml {
    Nvml::open(&[fake.folder().to_owned()]).unwrap()
}

fn look(fake: &FakeCuda) -> Vec<Result<State, Error>> {
    open(fake).look().unwrap()
}

#[test]
fn a_gpu_is_seen_with_all_that_it_tells() {
    let Some(fake) = fake() else { return };
    fake.nvml_sees(
        "gpu 87 1000 8000 250.5 700 43\nprocess 17 900\nprocess 18 -\ngpu - 0 4000 - - -\nforbidden\n",
    );
    let seen: Vec<State> = look(&fake).into_iter().map(Result::unwrap).collect();
    let [first, second] = &seen[..] else { panic!("{seen:?}") };
    let want = State {
        name: "Fake GPU".into(),
        uuid: "GPU-01010101-0101-0101-0101-010101010101".into(),
        memory: Some(Used { used: 1000 * MIB, total: 8000 * MIB }),
        busy_percent: Some(87),
        power_mw: Some(250_500),
        power_limit_mw: Some(700_000),
        temperature_c: Some(43),
        processes: Some(vec![Process { pid: 17, bytes: Some(900 * MIB) }, Process { pid: 18, bytes: None }]),
        parts: Vec::new(),
    };
    assert_eq!(*first, want);
    let told = (second.busy_percent, second.power_mw, second.temperature_c, &second.processes);
    assert_eq!(told, (None, None, None, &None));
    assert_eq!(fake.nvml().live(), 0, "shut down again");
}

#[test]
fn a_list_of_processes_that_is_longer_than_the_room_is_asked_for_again() {
    let Some(fake) = fake() else { return };
    let lines: String = (0..40).map(|pid| format!("process {pid} 1\n")).collect();
    fake.nvml_sees(&format!("gpu 0 0 1 0 0 0\n{lines}"));
    let processes = look(&fake).remove(0).unwrap().processes.unwrap();
    assert!(processes.iter().map(|process| process.pid).eq(0..40), "{processes:?}");
    assert_eq!(fake.nvml().calls("nvmlDeviceGetComputeRunningProcesses_v3"), 2);
}

#[test]
fn parts_of_a_gpu_are_told_one_by_one() {
    let Some(fake) = fake() else { return };
    let uuid = "MIG-0a0b0c0d-0102-0304-0506-070809101112";
    let lines = format!("part {uuid} 10 20000\npart MIG-2 0 20000\nprocess 17 9\nforbidden\n");
    fake.nvml_sees(&format!("gpu - 10 80000 60 700 30\n{lines}"));
    let State { parts, processes, .. } = look(&fake).remove(0).unwrap();
    let first = Part {
        name: "Fake GPU MIG 1g".into(),
        uuid: uuid.into(),
        memory: Some(Used { used: 10 * MIB, total: 20_000 * MIB }),
        processes: Some(Vec::new()),
    };
    let second = Some(vec![Process { pid: 17, bytes: Some(9 * MIB) }]);
    assert_eq!((processes, &parts[1].processes), (None, &second));
    assert_eq!((parts.len(), &parts[0], parts[1].uuid.as_str()), (2, &first, "MIG-2"));
}

#[test]
fn a_lost_gpu_is_told_beside_the_others() {
    let Some(fake) = fake() else { return };
    fake.nvml_sees("gpu 1 0 1 0 0 0\ngpu 2 0 1 0 0 0\nlost\ngpu 3 0 1 0 0 0\n");
    let seen = look(&fake);
    let busy = |i: usize| seen[i].as_ref().unwrap().busy_percent;
    assert_eq!((busy(0), busy(2)), (Some(1), Some(3)));
    let words = seen[1].as_ref().unwrap_err().to_string();
    assert!(["GPU 1", "lost", "dmesg"].iter().all(|part| words.contains(part)), "{words}");
}

#[test]
fn a_driver_that_is_not_loaded_is_told_with_what_to_do() {
    let Some(fake) = fake() else { return };
    for (code, part) in [(9, "modprobe nvidia"), (18, "start it again"), (999, "nvidia-smi")] {
        fake.nvml().fail("nvmlInit_v2", 1, code);
        let words = Nvml::open(&[fake.folder().to_owned()]).unwrap_err().to_string();
        assert!(words.contains("NVML fails: nvmlInit") && words.contains(part), "{words}");
    }
}

#[test]
fn the_driver_knows_gpus_by_the_same_names() {
    let Some(fake) = fake() else { return };
    fake.gpus(2);
    let driver = Driver::open(&[fake.folder().to_owned()]).unwrap();
    let seen: Vec<String> = look(&fake).into_iter().map(|state| state.unwrap().uuid).collect();
    let uuids: Vec<String> = driver.uuids().unwrap().iter().map(|uuid| format!("GPU-{uuid}")).collect();
    assert_eq!(seen, uuids);
    assert_eq!(open(&fake).driver_version().unwrap(), "580.00.fake");
}
