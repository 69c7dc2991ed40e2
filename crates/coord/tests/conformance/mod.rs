//! What every store promises, asked of whichever is given.

use phalanx_job::store::{
    Change, Entry, Event, Expect, Folder, Key, MAX_VALUE, MAX_WAIT_KEYS, Refusal, Revision, Scoped, Store,
    StoreError, Swap, Value, Watch,
};
use phalanx_wire::{Deadline, Generation};
use std::time::Duration;

pub(crate) const LIMIT: Duration = Duration::from_secs(20);

pub(crate) fn soon() -> Deadline {
    Deadline::after(LIMIT)
}

pub(crate) fn now() -> Deadline {
    Deadline::after(Duration::ZERO)
}

pub(crate) fn key(name: &str) -> Key {
    name.parse().unwrap()
}

pub(crate) fn folder(name: &str) -> Folder {
    name.parse().unwrap()
}

fn refusal<T: std::fmt::Debug>(result: Result<T, StoreError>) -> Refusal {
    let error = result.unwrap_err();
    error.refusal().unwrap_or_else(|| panic!("{error}")).clone()
}

fn set_event(event: Option<Event>) -> (Key, Value) {
    match event.map(|event| event.change) {
        Some(Change::Set { key, value }) => (key, value),
        other => panic!("{other:?}"),
    }
}

/// Plays all promises against stores that `connect` makes, each for another part of one and the same store.
pub(crate) fn keeps_its_promises<S: Store>(connect: impl Fn() -> S + Sync) {
    let run = |run, generation| Folder::of_run(run, Generation(generation)).unwrap();
    let scoped = |generation| Scoped::new(connect(), run("conformance", generation));
    values_and_revisions(&scoped(0));
    counters(&scoped(1), &scoped(1));
    listings_and_scopes(&scoped(2), &scoped(22));
    waits(&scoped(3), &scoped(3));
    watches(&scoped(4), &scoped(4));
    leases(scoped(5), &scoped(5));
    limits(&scoped(6));
}

fn values_and_revisions(store: &impl Store) {
    let a = key("some/gr\u{fc}n key");
    assert_eq!(store.get(&a).unwrap(), None);
    let first = store.set(&a, b"\x00\xff", None).unwrap();
    assert_eq!(store.get(&a).unwrap(), Some(Entry { value: Value::from(&[0, 0xff][..]), revision: first }));
    let second = store.set(&a, b"", None).unwrap();
    assert!(second > first);
    // The value is that of before, and so is nothing else.
    let third = store.set(&a, b"\x00\xff", None).unwrap();
    let swap = |expect, value: &[u8]| store.compare_and_set(&a, expect, value, None).unwrap();
    let present = Entry { value: Value::from(&[0, 0xff][..]), revision: third };
    assert_eq!(swap(Expect::Revision(first), b"x"), Swap::Conflict(Some(present.clone())));
    assert_eq!(swap(Expect::Absent, b"x"), Swap::Conflict(Some(present)));
    let Swap::Done(fourth) = swap(Expect::Revision(third), b"x") else { panic!("the revision was right") };
    assert!(fourth > third);
    assert!(store.delete(&a).unwrap() && !store.delete(&a).unwrap());
    assert_eq!(swap(Expect::Revision(fourth), b"y"), Swap::Conflict(None));
    assert!(matches!(swap(Expect::Absent, b"z"), Swap::Done(fifth) if fifth > fourth));
    assert_eq!(store.get(&a).unwrap().unwrap().value, *b"z");
}

/// Two clients with two threads each count together, and nothing is lost; of those who race for a key one wins.
fn counters(one: &impl Store, other: &impl Store) {
    let (count, crown) = (key("count"), key("crown"));
    let winners: usize = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..4)
            .map(|i| {
                let (count, crown) = (&count, &crown);
                let stores: [&dyn Store; 2] = [one, other];
                scope.spawn(move || {
                    let store = stores[i % 2];
                    let sums: Vec<i64> = (0..25).map(|_| store.add(count, 3).unwrap()).collect();
                    assert!(sums.is_sorted() && sums.iter().all(|sum| sum % 3 == 0));
                    let swap = store.compare_and_set(crown, Expect::Absent, &[i as u8], None).unwrap();
                    usize::from(matches!(swap, Swap::Done(_)))
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).sum()
    });
    assert_eq!((winners, one.add(&count, -300).unwrap()), (1, 0));
    assert_eq!(one.get(&count).unwrap().unwrap().value, *b"0");
    one.set(&count, b"many", None).unwrap();
    assert_eq!(refusal(one.add(&count, 1)), Refusal::NotANumber);
    one.set(&count, i64::MAX.to_string().as_bytes(), None).unwrap();
    assert_eq!(refusal(one.add(&count, 1)), Refusal::Overflow { value: i64::MAX, by: 1 });
}

fn listings_and_scopes(store: &impl Store, other: &impl Store) {
    let revisions: Vec<_> =
        ["b", "a/2", "a/10"].iter().map(|name| store.set(&key(name), b"", None).unwrap()).collect();
    other.set(&key("a/2"), b"", None).unwrap();
    let listing = store.list(&folder("a/")).unwrap();
    assert_eq!(listing.keys, [(key("a/10"), revisions[2]), (key("a/2"), revisions[1])]);
    assert!(listing.revision >= revisions[2]);
    assert_eq!(store.list(&Folder::root()).unwrap().keys.len(), 3);
    assert_eq!(store.list(&folder("a/1/")).unwrap().keys, []);
    assert_eq!(other.list(&Folder::root()).unwrap().keys.len(), 1);
    assert!(other.get(&key("b")).unwrap().is_none());
}

fn waits(store: &impl Store, other: &impl Store) {
    let keys = [key("a"), key("b")];
    store.wait(&[], now()).unwrap();
    other.set(&keys[1], b"", None).unwrap();
    match store.wait(&keys, Deadline::after(Duration::from_millis(30))) {
        Err(StoreError::Missing { keys, waited }) => {
            assert!(
                keys.len() == 1 && keys[0].as_str().ends_with("/a") && waited >= Duration::from_millis(30)
            );
        }
        result => panic!("{result:?}"),
    }
    // More than etcd takes in one transaction.
    let many: Vec<Key> = (0..300).map(|i| key(&format!("many/{i}"))).collect();
    many[1..].iter().for_each(|key| _ = store.set(key, b"", None).unwrap());
    assert!(matches!(store.wait(&many, now()), Err(StoreError::Missing { keys, .. }) if keys.len() == 1));
    store.set(&many[0], b"", None).unwrap();
    store.wait(&many, now()).unwrap();
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| store.wait(&keys, soon()));
        let getting = scope.spawn(|| store.get_when_there(&keys[0], soon()));
        // While these wait, the same client does something else.
        store.set(&key("elsewhere"), b"", None).unwrap();
        other.set(&keys[0], b"here", None).unwrap();
        waiting.join().unwrap().unwrap();
        assert_eq!(getting.join().unwrap().unwrap().value, *b"here");
    });
}

fn watches(store: &impl Store, other: &impl Store) {
    let from = store.list(&Folder::root()).unwrap().revision.next();
    let mut watch = Watch::new(store, folder("f/"), from);
    assert_eq!(watch.next(Deadline::after(Duration::from_millis(20))).unwrap(), None);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for i in 0..100 {
                other.set(&key("elsewhere"), b"", None).unwrap();
                other.set(&key(&format!("f/{}", i % 7)), &[i], None).unwrap();
            }
        });
        let mut last = from;
        for i in 0..100 {
            let event = watch.next(soon()).unwrap().unwrap();
            assert!(event.revision > last);
            last = event.revision;
            let want = (key(&format!("f/{}", i % 7)), Value::from(&[i][..]));
            assert_eq!(set_event(Some(event)), want);
        }
    });
    other.delete(&key("f/3")).unwrap();
    let event = watch.next(soon()).unwrap().unwrap();
    assert_eq!(event.change, Change::Gone { keys: vec![key("f/3")] });
    assert_eq!(watch.next(now()).unwrap(), None);
    // From the same revision on another reader sees the same; from any later one, the rest.
    let mut again = Watch::new(other, folder("f/"), from);
    assert_eq!(set_event(again.next(soon()).unwrap()), (key("f/0"), Value::from(&[0][..])));
    let mut rest = Watch::new(other, folder("f/"), event.revision);
    assert_eq!(rest.next(soon()).unwrap(), Some(event));
    // What was before all changes is known from the beginning, or known to be forgotten; it isn't passed over.
    match Watch::new(other, folder("f/"), Revision(0)).next(soon()) {
        Ok(event) => assert_eq!(set_event(event), (key("f/0"), Value::from(&[0][..]))),
        Err(error) => assert!(matches!(error.refusal(), Some(Refusal::Lagged { .. })), "{error}"),
    }
    let future = store.list(&Folder::root()).unwrap().revision.0 + 1000;
    let beyond = Watch::new(store, folder("f/"), Revision(future)).next(soon());
    assert!(matches!(refusal(beyond), Refusal::NotYet { .. }));
}

fn leases(store: impl Store, other: &impl Store) {
    let from = other.list(&Folder::root()).unwrap().revision.next();
    let mut watch = Watch::new(other, Folder::root(), from);
    let lease = store.grant(Duration::from_secs(60)).unwrap();
    assert!(lease.time_to_live >= Duration::from_secs(60));
    store.set(&key("alive/a"), b"1", Some(lease.id)).unwrap();
    store.compare_and_set(&key("alive/b"), Expect::Absent, b"1", Some(lease.id)).unwrap();
    store.set(&key("stays"), b"1", Some(lease.id)).unwrap();
    store.set(&key("stays"), b"2", None).unwrap();
    assert_eq!(other.add(&key("alive/a"), 1).unwrap(), 2);
    store.keep_alive(lease.id).unwrap();
    let no_lease = Refusal::NoLease { lease: lease.id };
    assert_eq!(refusal(other.set(&key("x"), b"", Some(lease.id))), no_lease);
    assert_eq!(refusal(other.keep_alive(lease.id)), no_lease);
    assert_eq!(refusal(other.revoke(lease.id)), no_lease);
    store.revoke(lease.id).unwrap();
    assert_eq!(refusal(store.keep_alive(lease.id)), no_lease);
    assert_eq!(refusal(store.set(&key("x"), b"", Some(lease.id))), no_lease);
    for _ in 0..5 {
        set_event(watch.next(soon()).unwrap());
    }
    let gone = Change::Gone { keys: vec![key("alive/a"), key("alive/b")] };
    assert_eq!(watch.next(soon()).unwrap().unwrap().change, gone);
    // One that isn't kept alive ends by itself.
    let short = store.grant(Duration::from_millis(50)).unwrap();
    store.set(&key("short"), b"", Some(short.id)).unwrap();
    set_event(watch.next(soon()).unwrap());
    assert_eq!(watch.next(soon()).unwrap().unwrap().change, Change::Gone { keys: vec![key("short")] });
    assert!(matches!(refusal(store.keep_alive(short.id)), Refusal::NoLease { .. }));
    // One whose owner leaves ends with it.
    let lease = store.grant(Duration::from_secs(3600)).unwrap();
    store.set(&key("owner"), b"", Some(lease.id)).unwrap();
    set_event(watch.next(soon()).unwrap());
    drop(store);
    assert_eq!(watch.next(soon()).unwrap().unwrap().change, Change::Gone { keys: vec![key("owner")] });
    let left: Vec<_> = other.list(&Folder::root()).unwrap().keys.into_iter().map(|(key, _)| key).collect();
    assert_eq!(left, [key("stays")]);
}

fn limits(store: &impl Store) {
    let long = vec![7; MAX_VALUE];
    let a = key("long");
    store.set(&a, &long, None).unwrap();
    assert_eq!(store.get(&a).unwrap().unwrap().value, Value::from(&long[..]));
    let error = store.set(&a, &vec![0; MAX_VALUE + 1], None).unwrap_err().to_string();
    assert!(error.contains("1048577 bytes, where at most 1048576") && error.contains("hint:"), "{error}");
    let many = vec![key("k"); MAX_WAIT_KEYS + 1];
    assert!(matches!(refusal(store.wait(&many, soon())), Refusal::Full { .. }));
    assert!(matches!(refusal(store.grant(Duration::from_secs(1 << 40))), Refusal::TimeToLive { .. }));
    let deep = store.set(&key(&"k".repeat(256)), b"", None).unwrap_err();
    assert!(matches!(deep, StoreError::BadKey(_)), "{deep}");
}
