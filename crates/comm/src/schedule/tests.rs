//! What every schedule promises, for worlds of 1 to 17 ranks on any hosts: each rank's contribution is in the result exactly
//! once, nobody waits for ever whatever the wires hold, sums have one order on all ranks and in all runs, and no more is sent
//! than theory says.

mod play;

use super::*;
use play::{MOST, Symbol, Wires, play, play_all_but};
use proptest::prelude::*;

/// A world: how many ranks, which hosts they are on, and in which order things happen there.
#[derive(Clone, Debug)]
struct World {
    topology: Topology,
    seed: u64,
}

fn worlds() -> impl Strategy<Value = World> {
    // Hosts of any sizes, and hosts of one size: blocks of ranks, or dealt out in turn.
    let uneven = prop::collection::vec(0usize..4, 1..=MOST);
    let even = (1usize..=4, 1usize..=4, any::<bool>()).prop_map(|(hosts, each, in_blocks)| {
        (0..hosts * each).map(|rank| if in_blocks { rank / each } else { rank % hosts }).collect()
    });
    let one_host = (1..=MOST).prop_map(|n| vec![0; n]);
    let hosts = prop_oneof![uneven, even, one_host];
    (hosts, any::<u64>())
        .prop_map(|(hosts, seed)| World { topology: Topology::of(&hosts, |a, b| a == b), seed })
}

/// Few bytes an element and many, so that small and large operations are met.
fn element_bytes() -> impl Strategy<Value = usize> {
    prop_oneof![Just(1), Just(1 << 12), Just(1 << 20)]
}

fn asked() -> impl Strategy<Value = Option<Algorithm>> {
    prop::option::of(prop::sample::select(Algorithm::OF_ALL_REDUCE.to_vec()))
}

impl World {
    fn n(&self) -> usize {
        self.topology.ranks()
    }

    fn schedules(&self, asked: Option<Algorithm>, of: impl Fn(Seat<'_>) -> Schedule) -> Vec<Schedule> {
        (0..self.n()).map(|rank| of(Seat { rank, topology: &self.topology, asked })).collect()
    }

    /// What the ranks end with, which is the same whatever the wires hold and in whatever order things happen.
    fn play(&self, schedules: &[Schedule], buffers: &[Vec<Symbol>]) -> Vec<Vec<Symbol>> {
        let ends = play(schedules, buffers, Wires::HoldNothing, self.seed);
        let again = play(schedules, buffers, Wires::HoldAll, !self.seed);
        assert!(ends == again, "{}: another run, another result", schedules[0].choice);
        ends
    }

    /// Buffers in which every rank has contributed everywhere.
    fn full(&self, len: usize) -> Vec<Vec<Symbol>> {
        (0..self.n()).map(|rank| (0..len).map(|i| Symbol::of(rank, i)).collect()).collect()
    }
}

fn are_sums(elements: &[Symbol], n: usize, from: usize) -> bool {
    elements.iter().enumerate().all(|(i, element)| element.is_sum(n, from + i))
}

/// What a schedule sends, in elements.
fn sent(schedule: &Schedule) -> usize {
    schedule.rounds.iter().flat_map(|round| &round.sends).map(|(_, range)| range.len()).sum()
}

fn messages(schedules: &[Schedule]) -> usize {
    schedules.iter().flat_map(|schedule| &schedule.rounds).map(|round| round.sends.len()).sum()
}

proptest! {
    #[test]
    fn an_all_reduce_sums_each_contribution_once_in_one_order(
        world in worlds(), asked in asked(), len in 0usize..40, bytes in element_bytes(),
    ) {
        let n = world.n();
        let schedules = world.schedules(asked, |seat| seat.all_reduce(len, bytes));
        let ends = world.play(&schedules, &world.full(len));
        prop_assert!(are_sums(&ends[0], n, 0), "{}", schedules[0].choice);
        prop_assert!(ends.iter().all(|end| *end == ends[0]), "{}: orders differ", schedules[0].choice);
        prop_assert!(schedules.iter().all(|schedule| schedule.choice == schedules[0].choice));
    }

    #[test]
    fn a_reduce_sums_each_contribution_once_at_its_root(
        world in worlds(), len in 0usize..40, bytes in element_bytes(), root in any::<prop::sample::Index>(),
    ) {
        let root = root.index(world.n());
        let schedules = world.schedules(None, |seat| seat.reduce(len, bytes, root));
        let ends = world.play(&schedules, &world.full(len));
        prop_assert!(are_sums(&ends[root], world.n(), 0), "{}", schedules[0].choice);
    }

    #[test]
    fn a_reduce_scatter_leaves_each_rank_the_sum_of_its_part(
        world in worlds(), size in 0usize..5, bytes in element_bytes(),
    ) {
        let n = world.n();
        let schedules = world.schedules(None, |seat| seat.reduce_scatter(n * size, bytes));
        let ends = world.play(&schedules, &world.full(n * size));
        for (rank, end) in ends.iter().enumerate() {
            prop_assert!(are_sums(&end[rank * size..][..size], n, rank * size), "{}", schedules[0].choice);
        }
    }

    #[test]
    fn an_all_gather_brings_every_part_to_every_rank(
        world in worlds(), size in 0usize..5, bytes in element_bytes(),
    ) {
        let n = world.n();
        let schedules = world.schedules(None, |seat| seat.all_gather(n * size, bytes));
        let whole: Vec<Symbol> = (0..n * size).map(|i| Symbol::of(i / size, i)).collect();
        let start = |rank: usize| {
            let is_own = |i: usize| (rank * size..(rank + 1) * size).contains(&i);
            (0..n * size).map(|i| if is_own(i) { whole[i] } else { Symbol::junk() }).collect()
        };
        let ends = world.play(&schedules, &(0..n).map(start).collect::<Vec<_>>());
        prop_assert!(ends.iter().all(|end| *end == whole), "{}", schedules[0].choice);
    }

    #[test]
    fn a_broadcast_brings_the_roots_buffer_to_every_rank(
        world in worlds(), len in 0usize..10, root in any::<prop::sample::Index>(),
    ) {
        let root = root.index(world.n());
        let schedules = world.schedules(None, |seat| seat.broadcast(len, root));
        let start = world.full(len);
        let ends = world.play(&schedules, &start);
        prop_assert!(ends.iter().all(|end| *end == start[root]), "{}", schedules[0].choice);
    }

    #[test]
    fn parts_come_together_at_a_root_and_go_out_from_it(
        world in worlds(), len in 0usize..5, root in any::<prop::sample::Index>(),
    ) {
        let (n, root) = (world.n(), root.index(world.n()));
        let part = |rank: usize| (0..len).map(|i| Symbol::of(rank, i)).collect::<Vec<_>>();
        let whole: Vec<Symbol> = (0..n).flat_map(part).collect();
        let at_root = |rank: usize| if rank == root { whole.clone() } else { part(rank) };
        let gathered = world.play(
            &world.schedules(None, |seat| seat.gather(len, root)), &(0..n).map(at_root).collect::<Vec<_>>(),
        );
        prop_assert!(gathered[root] == whole);
        let only_root = |rank: usize| if rank == root { whole.clone() } else { vec![Symbol::junk(); len] };
        let scattered = world.play(
            &world.schedules(None, |seat| seat.scatter(len, root)), &(0..n).map(only_root).collect::<Vec<_>>(),
        );
        prop_assert!((0..n).all(|rank| rank == root || scattered[rank] == part(rank)));
    }

    #[test]
    fn parts_of_any_length_go_from_all_to_all(
        world in worlds(), lengths in prop::collection::vec(0usize..4, MOST * MOST),
    ) {
        let n = world.n();
        let length = |from: usize, to: usize| lengths[from * MOST + to];
        let ranges = |lengths: Vec<usize>, mut at: usize| -> Vec<Range<usize>> {
            lengths.into_iter().map(|length| (at, at += length).0..at).collect()
        };
        let sends = |rank: usize| ranges((0..n).map(|to| length(rank, to)).collect(), 0);
        let receives = |rank: usize| {
            ranges((0..n).map(|from| length(from, rank)).collect(), sends(rank)[n - 1].end)
        };
        let message = |from: usize, to: usize| (0..length(from, to)).map(move |i| Symbol::of(from, to * 10 + i));
        let schedules = world.schedules(None, |seat| seat.all_to_all(&sends(seat.rank), &receives(seat.rank)));
        let start = |rank: usize| {
            let mut buffer: Vec<Symbol> = (0..n).flat_map(|to| message(rank, to)).collect();
            buffer.resize(receives(rank)[n - 1].end, Symbol::junk());
            buffer.copy_within(sends(rank)[rank].clone(), receives(rank)[rank].start);
            buffer
        };
        let ends = world.play(&schedules, &(0..n).map(start).collect::<Vec<_>>());
        for (rank, end) in ends.iter().enumerate() {
            let want: Vec<Symbol> = (0..n).flat_map(|from| message(from, rank)).collect();
            prop_assert!(end[sends(rank)[n - 1].end..] == want, "rank {rank}");
        }
    }

    #[test]
    fn nobody_leaves_a_barrier_before_everybody_came(
        world in worlds(), late in any::<prop::sample::Index>(), is_monitored in any::<bool>(),
    ) {
        let (n, late) = (world.n(), late.index(world.n()));
        let schedules = world.schedules(None, |seat| {
            if is_monitored { seat.monitored_barrier() } else { seat.barrier() }
        });
        let nothing = vec![Vec::new(); n];
        for wires in [Wires::HoldAll, Wires::HoldNothing] {
            play(&schedules, &nothing, wires, world.seed);
            let (_, done) = play_all_but(&schedules, &nothing, wires, world.seed, |rank| rank == late);
            prop_assert!(n == 1 || !done.contains(&true), "rank {late} didn't come, and {done:?} left");
        }
    }

    #[test]
    fn an_all_reduce_sends_what_theory_says(n in 2usize..=MOST, size in 1usize..4) {
        let world = World { topology: Topology::one_host(n), seed: 0 };
        let len = n * size;
        let by = |algorithm| world.schedules(Some(algorithm), |seat| seat.all_reduce(len, 4));
        let each_sends = |algorithm, want: usize| {
            let schedules = by(algorithm);
            let sent: Vec<usize> = schedules.iter().map(sent).collect();
            assert!(sent.iter().all(|&sent| sent == want), "{algorithm} of {n}: {sent:?}, want {want}");
            schedules
        };
        // 2 (n - 1) / n of a buffer is the least that is possible.
        let rounds = each_sends(Algorithm::Ring, 2 * (n - 1) * size)[0].rounds.len();
        prop_assert_eq!(rounds, 2 * (n - 1));
        let rounds = each_sends(Algorithm::Halving, 2 * (n - 1) * size)[0].rounds.len();
        prop_assert!(!n.is_power_of_two() || rounds == 2 * n.ilog2() as usize);
        each_sends(Algorithm::Direct, (n - 1) * len);
        let rounds = by(Algorithm::Doubling)[0].rounds.len();
        if n.is_power_of_two() {
            each_sends(Algorithm::Doubling, n.ilog2() as usize * len);
            prop_assert_eq!(rounds, n.ilog2() as usize);
        }
        // Each rank but one sends and is sent everything once.
        prop_assert_eq!(by(Algorithm::Star).iter().map(sent).sum::<usize>(), 2 * (n - 1) * len);
        prop_assert_eq!(by(Algorithm::Star)[n - 1].rounds.len(), 2);
        // Every rank but one sends up and is sent to, and none has more than log2 n below it.
        let tree = by(Algorithm::Tree);
        prop_assert_eq!(messages(&tree), 2 * (n - 1));
        let depth = n.next_power_of_two().ilog2() as usize;
        prop_assert!(tree.iter().all(|schedule| sent(schedule) <= depth * len));
    }

    #[test]
    fn as_little_crosses_between_hosts_as_if_each_had_one_rank(
        hosts in 2usize..=4, each in 1usize..=4, size in 1usize..3,
    ) {
        let places: Vec<usize> = (0..hosts * each).map(|rank| rank % hosts).collect();
        let topology = Topology::of(&places, |a, b| a == b);
        let world = World { topology: topology.clone(), seed: 0 };
        let len = hosts * each * size;
        let crossing = |schedule: &Schedule, rank: usize| -> usize {
            let sends = schedule.rounds.iter().flat_map(|round| &round.sends);
            sends.filter(|(to, _)| !topology.is_same(rank, *to)).map(|(_, range)| range.len()).sum()
        };
        let leaving = |schedules: &[Schedule], host: usize| -> usize {
            (0..world.n()).filter(|&r| topology.is_same(r, host)).map(|r| crossing(&schedules[r], r)).sum()
        };
        let large = world.schedules(Some(Algorithm::Hierarchical), |seat| seat.all_reduce(len, 1 << 20));
        for host in 0..hosts {
            prop_assert_eq!(leaving(&large, host), 2 * (hosts - 1) * len / hosts);
        }
        for root in 0..world.n() {
            let out = world.schedules(None, |seat| seat.broadcast(len, root));
            let back = world.schedules(None, |seat| seat.reduce(len, 1, root));
            for schedules in [out, back].iter().filter(|_| each > 1) {
                let crossing: usize = (0..hosts).map(|host| leaving(schedules, host)).sum();
                prop_assert_eq!(crossing, (hosts - 1) * len);
            }
        }
    }
}

#[test]
fn a_choice_says_why() {
    let two = Topology::one_host(2);
    let (four, eight) = (Topology::one_host(4), Topology::one_host(8));
    let hosts = Topology::of(&[0, 0, 1], |a, b| a == b);
    let apart = Topology::of(&[0, 1, 2], |a, b| a == b);
    let rows = [
        (&two, 4, None, "direct: 4 bytes between 2 ranks, up to 65536"),
        (&two, 4 << 20, None, "ring: 4194304 bytes between 2 ranks, above 65536"),
        (&two, 4, Some(Algorithm::Tree), "tree: asked for"),
        (&four, 4, None, "doubling: 4 bytes between 4 ranks, up to 8192"),
        (&eight, 8192, None, "star: 8192 bytes between 8 ranks, up to 8192"),
        (&eight, 8193, None, "tree: 8193 bytes between 8 ranks, above 8192, up to 131072"),
        (&eight, 1 << 20, None, "halving: 1048576 bytes between 8 ranks, above 131072"),
        (&apart, 16384, None, "doubling: 16384 bytes between 3 ranks, up to 16384"),
        (&hosts, 4, None, "hierarchical: 3 ranks on 2 hosts"),
        (&Topology::one_host(1), 4, Some(Algorithm::Ring), "direct: there are no other ranks"),
    ];
    for (topology, bytes, asked, want) in rows {
        assert_eq!(Seat { rank: 0, topology, asked }.all_reduce_choice(bytes).to_string(), want);
    }
}

#[test]
fn algorithms_have_names() {
    for algorithm in Algorithm::OF_ALL_REDUCE {
        assert_eq!(Algorithm::asked(&algorithm.to_string()), Ok(Some(algorithm)));
    }
    assert_eq!(Algorithm::asked("auto"), Ok(None));
    let error = Algorithm::asked("dissemination").unwrap_err();
    assert_eq!(error, "must be auto, direct, ring, halving, doubling, tree, star, hierarchical");
}
