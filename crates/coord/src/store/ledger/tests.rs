use super::*;
use proptest::prelude::*;

const A: Client = Client(1);
const B: Client = Client(2);
const START: Revision = Revision(100);

fn key(name: &str) -> Key {
    name.parse().unwrap()
}

fn folder(name: &str) -> Folder {
    name.parse().unwrap()
}

fn ms(n: u64) -> Duration {
    Duration::from_millis(n)
}

fn ledger() -> Ledger {
    Ledger::new(START, Limits::default())
}

fn set(name: &str, lease: Option<u64>) -> Ask {
    Ask::Set { key: key(name), value: Value::from(&b"v"[..]), lease: lease.map(LeaseId) }
}

/// Plays rows of (time, client, question, answers as `client:id answer`), and compares.
fn check(ledger: &mut Ledger, rows: &[(u64, Client, Option<Ask>, &[&str])]) {
    for (i, (now, client, ask, want)) in rows.iter().enumerate() {
        let sent = match ask {
            Some(ask) => ledger.handle(ms(*now), *client, i as u64, ask.clone()),
            None => ledger.tick(ms(*now)),
        };
        let got: Vec<String> =
            sent.iter().map(|s| format!("{}:{} {:?}", s.client.0, s.id, s.answer)).collect();
        let same = got.len() == want.len() && got.iter().zip(*want).all(|(got, want)| got.contains(want));
        assert!(same, "row {i}: {got:#?}, not {want:#?}");
    }
}

#[test]
fn a_wait_is_answered_when_all_keys_are_there_at_one_moment() {
    let wait = |limit_ms| Some(Ask::Wait { keys: vec![key("a"), key("b")], limit_ms });
    check(
        &mut ledger(),
        &[
            (0, A, wait(0), &["1:0 Missing([Key(\"a\"), Key(\"b\")])"]),
            (0, A, wait(50), &[]),
            (1, B, Some(set("a", None)), &["2:2 Done"]),
            (2, B, Some(Ask::Delete { key: key("a") }), &["2:3 Deleted(true)"]),
            (3, B, Some(set("b", None)), &["2:4 Done"]),
            (49, B, None, &[]),
            (50, B, None, &["1:1 Missing([Key(\"a\")])"]),
            (50, A, wait(50), &[]),
            (51, B, Some(set("a", None)), &["1:7 Done", "2:8 Done"]),
            (52, A, wait(0), &["1:9 Done"]),
        ],
    );
}

#[test]
fn a_lease_ends_when_it_is_not_kept_alive_and_its_keys_go_at_once() {
    let mut ledger = ledger();
    let poll = Some(Ask::Poll { folder: folder("f/"), from: START.next(), limit_ms: 1000 });
    check(
        &mut ledger,
        &[
            (0, A, Some(Ask::Grant { time_to_live_ms: 100 }), &["Granted(LeaseId(1))"]),
            (0, A, Some(set("f/x", Some(1))), &["Done(Revision(101))"]),
            (0, A, Some(set("f/y", Some(1))), &["Done(Revision(102))"]),
            (0, A, Some(set("f/z", Some(1))), &["Done(Revision(103))"]),
            // It stays, since it was given anew without a lease; and nobody else may use or keep the lease.
            (0, B, Some(set("f/z", None)), &["Done(Revision(104))"]),
            (0, B, Some(set("f/b", Some(1))), &["Refused(NoLease"]),
            (0, B, Some(Ask::KeepAlive { lease: LeaseId(1) }), &["Refused(NoLease"]),
            (0, B, Some(Ask::Revoke { lease: LeaseId(1) }), &["Refused(NoLease"]),
            (0, B, Some(Ask::Add { key: key("n"), by: 1 }), &["Sum(1)"]),
            (60, A, Some(Ask::KeepAlive { lease: LeaseId(1) }), &["Done"]),
            (159, B, poll.clone(), &["2:10 News"]),
            (159, B, Some(Ask::Poll { folder: folder("f/"), from: Revision(106), limit_ms: 1000 }), &[]),
            (160, A, Some(Ask::KeepAlive { lease: LeaseId(1) }), &["2:11 News", "1:12 Refused(NoLease"]),
            (160, A, Some(Ask::List { folder: folder("f/") }), &["keys: [(Key(\"f/z\"), Revision(104))]"]),
            (
                160,
                A,
                Some(Ask::Poll { folder: folder("f/"), from: Revision(106), limit_ms: 0 }),
                &[
                    "News { events: [Event { revision: Revision(106), change: Gone { keys: [Key(\"f/x\"), Key(\"f/y\")] } }]",
                ],
            ),
        ],
    );
    assert_eq!(ledger.next_end(), None);
}

#[test]
fn a_client_that_leaves_takes_its_leases_and_questions_along() {
    let mut ledger = ledger();
    check(
        &mut ledger,
        &[
            (0, A, Some(Ask::Grant { time_to_live_ms: 1000 }), &["Granted"]),
            (0, A, Some(set("x", Some(1))), &["Done"]),
            (0, A, Some(Ask::Wait { keys: vec![key("never")], limit_ms: 1000 }), &[]),
            (0, B, Some(Ask::Poll { folder: Folder::root(), from: Revision(102), limit_ms: 9 }), &[]),
        ],
    );
    let sent = ledger.close(A);
    assert!(
        matches!(&sent[..], [Sent { client: B, answer: Answer::News { events, .. }, .. }] if events.len() == 1)
    );
    assert_eq!(ledger.next_end(), None);
    assert!(ledger.handle(ms(1), B, 0, set("never", None)).iter().all(|sent| sent.client == B));
}

#[test]
fn add_counts_and_refuses_what_is_no_number() {
    let add = |name, by| Some(Ask::Add { key: key(name), by });
    check(
        &mut ledger(),
        &[
            (0, A, add("n", 5), &["Sum(5)"]),
            (0, B, add("n", -7), &["Sum(-2)"]),
            (0, A, Some(Ask::Get { key: key("n") }), &["value: \"-2\", revision: Revision(102)"]),
            (0, A, add("n", i64::MIN), &["Overflow"]),
            (0, A, Some(set("v", None)), &["Done"]),
            (0, A, add("v", 1), &["NotANumber"]),
            (0, A, Some(Ask::Grant { time_to_live_ms: 50 }), &["Granted"]),
            (
                0,
                A,
                Some(Ask::Set { key: key("l"), value: Value::from(&b"1"[..]), lease: Some(LeaseId(1)) }),
                &["Done"],
            ),
            (0, B, add("l", 1), &["Sum(2)"]),
            (50, B, Some(Ask::Get { key: key("l") }), &["Entry(None)"]),
        ],
    );
}

#[test]
fn what_clients_can_make_the_store_keep_is_bounded() {
    let limits = Limits { keys: 2, bytes: 20, parked: 3, leases: 1, lease_keys: 1, ..Limits::default() };
    let mut ledger = Ledger::new(START, limits);
    let wait = |keys: &[&str]| Some(Ask::Wait { keys: keys.iter().map(|k| key(k)).collect(), limit_ms: 5 });
    let long = Value::from(vec![0; 19]);
    let too_long = Value::from(vec![0; phalanx_job::store::MAX_VALUE + 1]);
    check(
        &mut ledger,
        &[
            (0, A, Some(Ask::Grant { time_to_live_ms: 50 }), &["Granted"]),
            (0, A, Some(Ask::Grant { time_to_live_ms: 50 }), &["leases of one client"]),
            (0, B, Some(Ask::Grant { time_to_live_ms: 0 }), &["TimeToLive"]),
            (0, A, Some(set("a", Some(1))), &["Done"]),
            (0, A, Some(set("b", Some(1))), &["keys under one lease"]),
            (0, A, Some(set("a", Some(1))), &["Done"]),
            (0, A, Some(set("b", None)), &["Done"]),
            (0, A, Some(set("c", None)), &["\"keys\""]),
            (0, A, Some(Ask::Set { key: key("b"), value: long, lease: None }), &["bytes"]),
            (0, A, Some(Ask::Set { key: key("b"), value: too_long, lease: None }), &["ValueTooLong"]),
            (0, A, wait(&["x", "y"]), &[]),
            (0, A, wait(&["x", "y"]), &["one client waits for"]),
            (0, B, wait(&["x", "y"]), &[]),
            // What was refused has changed nothing, and what is gone makes room.
            (0, A, Some(Ask::Get { key: key("b") }), &["value: \"v\""]),
            (0, A, Some(Ask::Delete { key: key("b") }), &["true"]),
            (0, A, Some(set("c", None)), &["Done"]),
        ],
    );
}

/// A reader that comes too late is told so, and one of another store too.
#[test]
fn a_reader_is_told_when_it_would_lose_a_change() {
    let mut ledger = Ledger::new(START, Limits { history_events: 3, ..Limits::default() });
    let poll = |from| Some(Ask::Poll { folder: folder("f/"), from: Revision(from), limit_ms: 10 });
    check(
        &mut ledger,
        &[(0, A, poll(101), &[]), (0, A, poll(102), &["NotYet"]), (0, A, poll(100), &["Lagged"])],
    );
    for i in 0..5 {
        let sent = ledger.handle(ms(1), B, i, set("elsewhere", None));
        assert_eq!(sent.len(), 1);
    }
    check(
        &mut ledger,
        &[
            // The parked reader has lost nothing that it wanted, and goes on behind what it wasn't told.
            (10, A, None, &["1:0 News { events: [], next: Revision(106) }"]),
            (10, A, poll(102), &["Lagged { from: Revision(102), first: Revision(103) }"]),
            (10, A, poll(103), &[]),
            (
                10,
                A,
                Some(set("f/a", None)),
                &["1:2 News { events: [Event { revision: Revision(106)", "1:3 Done"],
            ),
        ],
    );
}

#[test]
fn a_number_used_twice_voids_the_first_question() {
    let mut ledger = ledger();
    let wait = |name, limit_ms| Ask::Wait { keys: vec![key(name)], limit_ms };
    assert!(ledger.handle(ms(0), A, 7, wait("a", 10)).is_empty());
    assert!(ledger.handle(ms(0), A, 7, wait("b", 20)).is_empty());
    assert!(ledger.tick(ms(10)).is_empty());
    assert_eq!(ledger.handle(ms(11), B, 0, set("a", None)).len(), 1);
    assert_eq!(ledger.tick(ms(20)).len(), 1);
    assert_eq!(ledger.next_end(), None);
}

/// Value, revision, lease.
type ModelEntry = (Vec<u8>, u64, Option<usize>);

/// The store as its definition says, without an index anywhere.
#[derive(Default)]
struct Model {
    entries: Vec<(Key, ModelEntry)>,
    /// Ends, time to live, owner; none when it has ended.
    leases: Vec<Option<(u64, u64, Client)>>,
    /// Client, id, keys, ends.
    waits: Vec<(Client, u64, Vec<Key>, u64)>,
    log: Vec<Event>,
}

impl Model {
    fn find(&self, key: &Key) -> Option<&ModelEntry> {
        self.entries.iter().find(|(k, _)| k == key).map(|(_, entry)| entry)
    }

    fn changed(&mut self, change: Change) -> Revision {
        let revision = Revision(START.0 + 1 + self.log.len() as u64);
        self.log.push(Event { revision, change });
        revision
    }

    fn set(&mut self, key: &Key, value: &[u8], lease: Option<usize>) -> Revision {
        let revision = self.changed(Change::Set { key: key.clone(), value: Value::from(value) });
        self.entries.retain(|(k, _)| k != key);
        self.entries.push((key.clone(), (value.to_vec(), revision.0, lease)));
        revision
    }

    fn remove(&mut self, gone: impl Fn(&Key, Option<usize>) -> bool) {
        let mut keys: Vec<Key> =
            self.entries.iter().filter(|(k, e)| gone(k, e.2)).map(|(k, _)| k.clone()).collect();
        self.entries.retain(|(k, e)| !gone(k, e.2));
        keys.sort();
        if !keys.is_empty() {
            self.changed(Change::Gone { keys });
        }
    }

    fn expire(&mut self, now: u64) -> Vec<Sent> {
        loop {
            let ended = |lease: &Option<(u64, u64, Client)>| lease.filter(|(ends, ..)| *ends <= now);
            let first = (0..self.leases.len()).filter_map(|i| Some((ended(&self.leases[i])?.0, i))).min();
            let Some((_, i)) = first else { break };
            self.leases[i] = None;
            self.remove(|_, lease| lease == Some(i));
        }
        let (over, left): (Vec<_>, Vec<_>) = self.waits.drain(..).partition(|wait| wait.3 <= now);
        self.waits = left;
        let missing = |keys: Vec<Key>| keys.into_iter().filter(|key| self.find(key).is_none()).collect();
        over.into_iter()
            .map(|(client, id, keys, _)| Sent { client, id, answer: Answer::Missing(missing(keys)) })
            .collect()
    }

    fn handle(&mut self, now: u64, client: Client, id: u64, ask: Ask) -> Vec<Sent> {
        let mut sent = self.expire(now);
        let revision = |model: &Model| Revision(START.0 + model.log.len() as u64);
        let owned = |model: &Model, lease: LeaseId| {
            let i = lease.0 as usize - 1;
            model.leases.get(i).copied().flatten().is_some_and(|(.., owner)| owner == client).then_some(i)
        };
        let entry = |model: &Model, key: &Key| {
            model
                .find(key)
                .map(|(value, r, _)| Entry { value: Value::from(&value[..]), revision: Revision(*r) })
        };
        let mut answer = None;
        match ask {
            Ask::Get { key } => answer = Some(Answer::Entry(entry(self, &key))),
            Ask::Set { key, value, lease: None } => answer = Some(Answer::Done(self.set(&key, &value, None))),
            Ask::Set { key, value, lease: Some(lease) } => {
                answer = Some(match owned(self, lease) {
                    Some(i) => Answer::Done(self.set(&key, &value, Some(i))),
                    None => Answer::Refused(Refusal::NoLease { lease }),
                });
            }
            Ask::Add { key, by } => {
                let old = self.find(&key).cloned().unwrap_or((b"0".to_vec(), 0, None));
                answer = Some(match String::from_utf8(old.0).unwrap().parse::<i64>() {
                    Ok(value) => {
                        self.set(&key, (value + by).to_string().as_bytes(), old.2);
                        Answer::Sum(value + by)
                    }
                    Err(_) => Answer::Refused(Refusal::NotANumber),
                });
            }
            Ask::CompareAndSet { key, expect, value, .. } => {
                let present = entry(self, &key);
                let is = present.as_ref().map_or(Expect::Absent, |entry| Expect::Revision(entry.revision));
                answer = Some(if is == expect {
                    Answer::Done(self.set(&key, &value, None))
                } else {
                    Answer::Entry(present)
                });
            }
            Ask::Delete { key } => {
                answer = Some(Answer::Deleted(self.find(&key).is_some()));
                self.remove(|k, _| *k == key);
            }
            Ask::Grant { time_to_live_ms } => {
                self.leases.push(Some((now + time_to_live_ms, time_to_live_ms, client)));
                answer = Some(Answer::Granted(LeaseId(self.leases.len() as u64)));
            }
            Ask::KeepAlive { lease } | Ask::Revoke { lease } if owned(self, lease).is_none() => {
                answer = Some(Answer::Refused(Refusal::NoLease { lease }));
            }
            Ask::KeepAlive { lease } => {
                let (ends, time_to_live, _) = self.leases[lease.0 as usize - 1].as_mut().unwrap();
                *ends = now + *time_to_live;
                answer = Some(Answer::Done(revision(self)));
            }
            Ask::Revoke { lease } => {
                let i = lease.0 as usize - 1;
                self.leases[i] = None;
                self.remove(|_, lease| lease == Some(i));
                answer = Some(Answer::Done(revision(self)));
            }
            Ask::Wait { keys, limit_ms } => self.waits.push((client, id, keys, now + limit_ms)),
            Ask::List { .. } | Ask::Poll { .. } => unreachable!("asked by the test itself"),
        }
        sent.extend(answer.map(|answer| Sent { client, id, answer }));
        let (done, left): (Vec<_>, Vec<_>) = self
            .waits
            .drain(..)
            .partition(|(.., keys, _)| keys.iter().all(|key| self.entries.iter().any(|(k, _)| k == key)));
        self.waits = left;
        let revision = revision(self);
        sent.extend(done.into_iter().map(|(client, id, ..)| Sent {
            client,
            id,
            answer: Answer::Done(revision),
        }));
        sent.extend(self.expire(now));
        sent
    }
}

fn some_key() -> impl Strategy<Value = Key> {
    prop::sample::select(vec!["a", "f/x", "f/y", "f/g/z"]).prop_map(key)
}

fn some_ask() -> impl Strategy<Value = Ask> {
    let value =
        prop::sample::select(vec!["1", "22", "no number"]).prop_map(|text| Value::from(text.as_bytes()));
    let lease = (1u64..4).prop_map(LeaseId);
    let expect = prop_oneof![
        Just(Expect::Absent),
        (100u64..130).prop_map(|revision| Expect::Revision(Revision(revision)))
    ];
    prop_oneof![
        1 => some_key().prop_map(|key| Ask::Get { key }),
        4 => (some_key(), value.clone(), prop::option::weighted(0.8, lease.clone()))
            .prop_map(|(key, value, lease)| Ask::Set { key, value, lease }),
        1 => (some_key(), -3i64..4).prop_map(|(key, by)| Ask::Add { key, by }),
        1 => (some_key(), expect, value).prop_map(|(key, expect, value)| Ask::CompareAndSet {
            key,
            expect,
            value,
            lease: None
        }),
        1 => some_key().prop_map(|key| Ask::Delete { key }),
        1 => (10u64..200).prop_map(|time_to_live_ms| Ask::Grant { time_to_live_ms }),
        1 => lease.clone().prop_map(|lease| Ask::KeepAlive { lease }),
        1 => lease.prop_map(|lease| Ask::Revoke { lease }),
        2 => (prop::collection::vec(some_key(), 0..4), 0u64..50)
            .prop_map(|(keys, limit_ms)| Ask::Wait { keys, limit_ms }),
    ]
}

/// A reader that always has a poll open, and what it was told.
struct Reader {
    client: Client,
    folder: Folder,
    next: Revision,
    told: Vec<Event>,
}

impl Reader {
    /// Asks until it has to wait.
    fn ask(&mut self, ledger: &mut Ledger, now: u64) {
        let (folder, from) = (self.folder.clone(), self.next);
        let ask = Ask::Poll { folder, from, limit_ms: 25 };
        for sent in ledger.handle(ms(now), self.client, 0, ask) {
            self.hear(sent, ledger, now);
        }
    }

    fn hear(&mut self, sent: Sent, ledger: &mut Ledger, now: u64) {
        assert_eq!(sent.client, self.client);
        let Answer::News { events, next } = sent.answer else { panic!("{:?}", sent.answer) };
        self.told.extend(events);
        self.next = next;
        self.ask(ledger, now);
    }
}

proptest! {
    /// K-ORDER, K-WAKE and K-LEASE against the definition, answer by answer, at every step.
    #[test]
    fn the_ledger_does_what_its_definition_says(
        steps in prop::collection::vec((0u64..15, 1u64..3, some_ask()), 1..150),
    ) {
        let (mut ledger, mut model, mut now) = (ledger(), Model::default(), 0);
        let mut readers: Vec<Reader> = ["", "f/", "f/g/"].iter().zip(10..).map(|(name, n)| {
            Reader { client: Client(n), folder: folder(name), next: START.next(), told: Vec::new() }
        }).collect();
        readers.iter_mut().for_each(|reader| reader.ask(&mut ledger, 0));
        for (id, (later, client, ask)) in (1..).zip(steps) {
            now += later;
            let mut want = model.handle(now, Client(client), id, ask.clone());
            let mut got = Vec::new();
            for sent in ledger.handle(ms(now), Client(client), id, ask) {
                match readers.iter_mut().find(|reader| reader.client == sent.client) {
                    Some(reader) => reader.hear(sent, &mut ledger, now),
                    None => got.push(sent),
                }
            }
            // Those who wait for the same change are answered in no order that matters.
            want.sort_by_key(|sent| (sent.client, sent.id));
            got.sort_by_key(|sent| (sent.client, sent.id));
            prop_assert_eq!(got, want);
            for reader in &readers {
                let want: Vec<Event> = model.log.iter().filter_map(|event| below(&reader.folder, event)).collect();
                prop_assert_eq!(&reader.told, &want);
            }
            let Answer::Listing { keys, .. } = ledger.list(&Folder::root()).unwrap() else { panic!() };
            let mut want: Vec<_> = model.entries.iter().map(|(k, e)| (k.clone(), Revision(e.1))).collect();
            want.sort();
            prop_assert_eq!(keys, want);
        }
        prop_assert_eq!(ledger.bytes, model.entries.iter().map(|(k, e)| k.as_str().len() + e.0.len()).sum::<usize>());
    }
}
