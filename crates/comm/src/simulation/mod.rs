//! Whole worlds of ranks in one thread, under one number: what happens in them follows from their seed.
//!
//! A world has 2 to 9 ranks in some groups, and a script of operations that all of them play: collectives, letters, several
//! of them at once. It moves the ranks one look at a time, in any order; lets what they sent arrive in pieces as small as a
//! byte, whenever it likes; gives each a clock of its own; and hurts them: it kills ranks, cuts connections, stops ranks for
//! a while or for good, cuts them off without a word, aborts groups, and has a rank misunderstand what all are to do. Then
//! the survivors become groups of a new generation, and the script goes on.
//!
//! What must hold in every world: an operation ends with the right result or with the right error (`blame.rs`); nobody waits
//! when all that can arrive has arrived, except for ranks that are stopped or cut off, and then its deadline ends that; where
//! nobody was hurt nothing fails.
//!
//! The engine, the mail and the schedules are the real ones. What is not: connections, the handshake that fences off old
//! generations, and threads; the tests of groups and processes have these.

mod blame;
mod chance;
mod garbage;
mod network;
mod player;
mod script;
mod world;

use world::World;

/// Worlds that are tried.
const SEEDS: u64 = 10_000;
/// Worlds that went wrong of which a failed test tells.
const TOLD: usize = 5;
/// A seed to be tried alone, with all that happens in its world told.
const REPLAY: &str = "PHALANX_SIMULATION_SEED";

#[test]
fn ten_thousand_worlds_end_with_right_results_or_right_errors() {
    if let Ok(seed) = std::env::var(REPLAY) {
        let seed = seed.parse().expect("a seed is a number");
        return play(seed, true).unwrap();
    }
    let threads = std::thread::available_parallelism().map_or(1, usize::from) as u64;
    let seeds = |first| (first..SEEDS).step_by(threads as usize);
    let wrong: Vec<String> = std::thread::scope(|scope| {
        let part =
            |first| scope.spawn(move || seeds(first).filter_map(|seed| play(seed, false).err()).collect());
        let parts: Vec<_> = (0..threads).map(part).collect();
        parts
            .into_iter()
            .flat_map(|part| part.join().unwrap_or_else(|_| vec!["a panic, above".into()]))
            .collect()
    });
    let told: Vec<_> = wrong.iter().take(TOLD).cloned().collect();
    assert!(wrong.is_empty(), "{} of {SEEDS} worlds went wrong, such as\n{}", wrong.len(), told.join("\n"));
}

/// What went wrong in a world, if anything did.
fn play(seed: u64, told: bool) -> Result<(), String> {
    /// Names the seed where a world ends in a panic.
    struct Named(u64);
    impl Drop for Named {
        fn drop(&mut self) {
            if std::thread::panicking() {
                eprintln!("this was world {0}; {REPLAY}={0} shows it alone", self.0);
            }
        }
    }
    let _named = Named(seed);
    World::new(seed, told).play().map_err(|wrong| format!("world {seed} ({REPLAY}={seed} shows it): {wrong}"))
}
