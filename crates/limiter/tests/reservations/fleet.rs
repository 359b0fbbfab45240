//! The servers of a fleet: one server with a memory store, or two servers that share a Redis. All
//! clocks, including that of Redis, show the time that the test sets.

use std::{path::PathBuf, sync::Arc, time::Duration};

use tempfile::TempDir;
use tidegate::{Clock, RateLimiter as _, rate_limiter::SlotTurn};
use tidegate_config::{Config, ReservationExpiry, ReservationsConfig};
use tidegate_core::{
    Charge, Cost, Decision, Effect, FallbackShare, Limits, MemoryBounds, MemoryStore, Override,
    OverrideTarget, Replacement, Request, Scratch, Span, Timestamp, Verdict,
};
use tidegate_limiter::{
    ServerLimiter,
    reservations::{
        CounterCharge, CounterSettlement, Reservation, ReservationError, Reservations,
        SettledReservation,
    },
    snapshot::{self, RestoreOutcome},
};
use tidegate_redis::{
    Address, FallbackSettings, FallbackStore, NodeShare, Redis, RedisSettings, Topology,
};
use tokio::runtime::{Builder, Runtime};

use crate::{
    kind::{Change, Kind},
    twin::WRITE_INTERVAL,
};

/// The users. A rule has one key for each user.
pub(crate) const USERS: [&str; 2] = ["u", "v"];
/// The device of each user. Every second rule has one key for each device.
pub(crate) const DEVICES: [&str; 2] = ["device-u", "device-v"];
/// The counters, which belong to no rule.
const COUNTERS: [(&[u8], Kind); 2] = [(b"counter-1", Kind::Budget), (b"counter-2", Kind::Log)];

const SECRET: &str = "the-secret-of-the-fleet";

/// The store of the servers.
pub(crate) enum Backend {
    Memory,
    Redis(Arc<Redis>),
}

/// A server.
struct Node {
    limiter: Arc<ServerLimiter>,
    clock: Clock,
}

pub(crate) struct Fleet<'r> {
    runtime: &'r Runtime,
    backend: &'r Backend,
    kinds: Vec<Kind>,
    /// How the limits of each rule have changed.
    changes: Vec<Change>,
    on_expiry: ReservationExpiry,
    prefix: String,
    nodes: Vec<Node>,
    now: u64,
    folder: TempDir,
    counter_limits: [Arc<Limits>; 2],
}

pub(crate) fn runtime() -> Runtime {
    Builder::new_current_thread().enable_all().build().unwrap()
}

impl Backend {
    /// Connects to the Redis, Valkey, or cluster node at `url`.
    pub(crate) fn connect(runtime: &Runtime, url: &str, is_cluster: bool) -> Self {
        let address = Address::parse(url).unwrap().0;
        let topology = if is_cluster {
            Topology::Cluster {
                seeds: vec![address],
            }
        } else {
            Topology::Standalone(address)
        };
        let settings = RedisSettings {
            // Longer than the default, because tests may be slow on a busy machine.
            timeout: Duration::from_secs(10),
            ..RedisSettings::new(topology)
        };
        let redis = Arc::new(Redis::start(settings, runtime.handle()));
        runtime.block_on(async {
            let is_up = || {
                let health = redis.health();
                health.up == 1 && health.unserved_slots == 0
            };
            while !is_up() {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        });
        Self::Redis(redis)
    }

    pub(crate) fn is_shared(&self) -> bool {
        matches!(self, Self::Redis(_))
    }
}

impl<'r> Fleet<'r> {
    /// Starts the servers, with one rule for each of `kinds`. All keys in Redis begin with
    /// `prefix`.
    pub(crate) fn start(
        runtime: &'r Runtime,
        backend: &'r Backend,
        kinds: &[Kind],
        on_expiry: ReservationExpiry,
        prefix: String,
        now: u64,
    ) -> Self {
        let counter_limits = COUNTERS.map(|(_, kind)| {
            let rules = Config::parse(&rules(&[kind], &[Change::None]))
                .unwrap()
                .rules;
            Arc::clone(rules.rule("r0").unwrap().limits())
        });
        let mut fleet = Self {
            runtime,
            backend,
            kinds: kinds.to_vec(),
            changes: vec![Change::None; kinds.len()],
            on_expiry,
            prefix,
            nodes: Vec::new(),
            now,
            folder: tempfile::tempdir().unwrap(),
            counter_limits,
        };
        let count = if backend.is_shared() { 2 } else { 1 };
        for _ in 0..count {
            let store = MemoryStore::new(MemoryBounds::default());
            fleet.nodes.push(fleet.node(store));
        }
        fleet.set_clocks(now);
        fleet
    }

    fn node(&self, store: MemoryStore) -> Node {
        let rules = Config::parse(&rules(&self.kinds, &self.changes))
            .unwrap()
            .rules;
        let clock = Clock::manual(timestamp(self.now));
        let limiter = match self.backend {
            Backend::Memory => ServerLimiter::new(rules, store, clock.clone()),
            Backend::Redis(redis) => {
                let settings = FallbackSettings {
                    share: NodeShare::Fixed(FallbackShare::default()),
                    // A cached denial of one server outlasts a refund by another server.
                    denial_ttl: Span::ZERO,
                    ..FallbackSettings::default()
                };
                let store = FallbackStore::new(Arc::clone(redis), &self.prefix, store, settings);
                ServerLimiter::new(rules, store, clock.clone())
            }
        };
        let settings = ReservationsConfig {
            on_expiry: self.on_expiry,
            ..ReservationsConfig::default()
        };
        let reservations = Reservations::new(settings, Some(SECRET));
        Node {
            limiter: Arc::new(limiter.with_reservations(reservations.unwrap())),
            clock,
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.nodes.len()
    }

    /// Sets all clocks.
    pub(crate) fn set_clocks(&mut self, now: u64) {
        self.now = now;
        for node in &self.nodes {
            node.clock.set(timestamp(now));
            if let Some(redis_store) = node.limiter.redis_store() {
                redis_store.store().pin_clock(timestamp(now));
            }
        }
    }

    /// Kills a server without a graceful shutdown, and starts another in its place.
    pub(crate) fn kill(&mut self, server: usize) {
        let store = MemoryStore::new(MemoryBounds::default());
        if self.backend.is_shared() {
            self.nodes[server] = self.node(store);
        } else {
            let restored = snapshot::restore(&store, &self.snapshot(), timestamp(self.now));
            let RestoreOutcome::Restored { reservations, .. } = restored.unwrap() else {
                panic!("the snapshot is not restored");
            };
            self.nodes[server] = self.node(store);
            self.nodes[server]
                .limiter
                .restore_reservations(&reservations);
        }
        self.set_clocks(self.now);
    }

    /// Writes the snapshot of the server with the memory store.
    pub(crate) fn save_snapshot(&self) {
        self.nodes[0]
            .limiter
            .save_snapshot(&self.snapshot())
            .unwrap();
    }

    fn snapshot(&self) -> PathBuf {
        self.folder.path().join("snapshot")
    }

    /// Runs the background tasks of every server once. The preceding call was `elapsed`
    /// microseconds earlier.
    pub(crate) fn run_tasks(&self, elapsed: u64) {
        for node in &self.nodes {
            self.run(node.limiter.expire_reservations());
        }
        if elapsed >= WRITE_INTERVAL {
            self.write_expiry_queues();
        }
        for node in &self.nodes {
            self.run(node.limiter.end_orphaned_reservations());
        }
    }

    pub(crate) fn write_expiry_queues(&self) {
        for node in &self.nodes {
            assert!(self.run(node.limiter.write_expiry_queue()));
        }
    }

    fn run<T>(&self, future: impl Future<Output = T>) -> T {
        self.runtime.block_on(future)
    }

    /// Returns the limits and the key with the index `key`: the keys of the rules by user, followed
    /// by the counters.
    fn key(&self, server: usize, key: usize) -> (Vec<u8>, Arc<Limits>) {
        if let Some(counter) = key.checked_sub(self.kinds.len() * USERS.len()) {
            let limits = &self.counter_limits[counter];
            return (COUNTERS[counter].0.to_vec(), Arc::clone(limits));
        }
        let rules = self.nodes[server].limiter.rules();
        let (number, user) = (key / USERS.len(), key % USERS.len());
        let rule = rules.rule(&format!("r{number}")).unwrap();
        let (_, value) = entries_of(user)[number % 2];
        let key = rule.encode_key(&[value]).unwrap();
        let limits = rules.limits_of_key(rule, &key, None, timestamp(self.now));
        (key, limits)
    }

    /// Overrides a rule's limits for all keys, on every server.
    pub(crate) fn set_override(&self, rule: &str, replacement: Replacement) {
        let found = Override {
            replacement,
            until: None,
            reason: "a test".into(),
        };
        for node in &self.nodes {
            let (overrides, now) = (node.limiter.overrides(), timestamp(self.now));
            let target = OverrideTarget::of(&["*"]);
            overrides.set(rule, &target, found.clone(), now).unwrap();
        }
    }

    /// Removes the override of [`Self::set_override`].
    pub(crate) fn remove_override(&self, rule: &str) {
        for node in &self.nodes {
            let target = OverrideTarget::of(&["*"]);
            assert!(node.limiter.overrides().remove(rule, &target).is_some());
        }
    }

    /// Replaces the rules of every server with those of the rules file `rules`.
    pub(crate) fn reload(&self, rules: &str) {
        for node in &self.nodes {
            let rules = Config::parse(rules).unwrap().rules;
            let former = node.limiter.rules();
            node.limiter.swap_rules(rules.inheriting_from(&former));
        }
    }

    /// Changes the limits of the rule with this index on every server.
    pub(crate) fn change(&mut self, rule: usize, change: Change) {
        self.changes[rule] = change;
        self.reload(&rules(&self.kinds, &self.changes));
    }

    /// Returns the indices of the keys that a request of `user` charges.
    pub(crate) fn keys_of(&self, user: usize) -> Vec<usize> {
        let rules = 0..self.kinds.len();
        rules.map(|rule| rule * USERS.len() + user).collect()
    }

    /// Returns the kind of each rule.
    pub(crate) fn rule_kinds(&self) -> &[Kind] {
        &self.kinds
    }

    /// Returns the indices of the counters.
    pub(crate) fn counters(&self) -> Vec<usize> {
        let first = self.kinds.len() * USERS.len();
        (first..first + COUNTERS.len()).collect()
    }

    /// Returns the kind of each key.
    pub(crate) fn kinds_of_keys(&self) -> impl Iterator<Item = Kind> {
        let rules = self.kinds.iter().flat_map(|kind| [*kind; USERS.len()]);
        rules.chain(COUNTERS.map(|(_, kind)| kind))
    }

    /// Returns the remaining units of a key.
    pub(crate) fn remaining(&self, server: usize, key: usize) -> u64 {
        let change = self.changes.get(key / USERS.len());
        let limit = change.map_or(0, |change| change.index_of_limit());
        let (key, limits) = self.key(server, key);
        let charge = Charge::new(&key, &limits, Cost::ONE).unwrap();
        let inspect = self.nodes[server].limiter.inspect(charge, Effect::Look);
        self.run(inspect).unwrap()[limit].remaining
    }

    /// Returns the remaining units of the key `value` of a rule.
    pub(crate) fn remaining_of(&self, server: usize, rule: &str, value: &str) -> u64 {
        let limiter = &self.nodes[server].limiter;
        let rules = limiter.rules();
        let rule = rules.rule(rule).unwrap();
        let key = rule.encode_key(&[value]).unwrap();
        let charge = Charge::new(&key, rule.limits(), Cost::ONE).unwrap();
        self.run(limiter.inspect(charge, Effect::Look)).unwrap()[0].remaining
    }

    /// Inspects a key of a rule under the limits of the rule, whatever overrides or plans apply.
    pub(crate) fn inspect_under_rule(&self, server: usize, key: usize, effect: Effect) {
        let (key, _) = self.key(server, key);
        let rules = self.nodes[server].limiter.rules();
        let limits = rules.rule_of(&key).unwrap().limits();
        let charge = Charge::new(&key, limits, Cost::ONE).unwrap();
        let inspect = self.nodes[server].limiter.inspect(charge, effect);
        assert!(!self.run(inspect).unwrap().is_empty());
    }

    pub(crate) fn reset(&self, server: usize, key: usize) {
        let (key, _) = self.key(server, key);
        let reset = self.nodes[server].limiter.reset(&key);
        self.run(async { reset.await }).unwrap();
    }

    /// Sends a request without a reservation. Returns whether it is admitted.
    pub(crate) fn check(&self, server: usize, user: usize, cost: u64, effect: Effect) -> bool {
        self.check_entries(server, &entries_of(user), cost, effect)
    }

    /// Sends a request with these entries, without a reservation. Returns whether it is admitted.
    pub(crate) fn check_entries(
        &self,
        server: usize,
        entries: &[(&str, &str)],
        cost: u64,
        effect: Effect,
    ) -> bool {
        let limiter = &self.nodes[server].limiter;
        let request = Request::new(entries, Cost::new(cost).unwrap()).unwrap();
        let (rules, mut scratch) = (limiter.rules(), Scratch::default());
        let check = limiter.check(&rules, &mut scratch, &request, effect);
        self.run(async { check.await.unwrap().allowed })
    }

    pub(crate) fn reserve(
        &self,
        server: usize,
        user: usize,
        cost: u64,
        ttl: u64,
    ) -> Option<Reservation> {
        self.reserve_entries(server, &entries_of(user), cost, ttl)
    }

    /// Reserves the charges of a request with these entries.
    pub(crate) fn reserve_entries(
        &self,
        server: usize,
        entries: &[(&str, &str)],
        cost: u64,
        ttl: u64,
    ) -> Option<Reservation> {
        let limiter = &self.nodes[server].limiter;
        let request = Request::new(entries, Cost::new(cost).unwrap()).unwrap();
        let (rules, mut scratch) = (limiter.rules(), Scratch::default());
        let finish = |_: &_, verdict: &Verdict<'_>, reservation: Option<Reservation>| {
            assert_eq!(verdict.allowed, reservation.is_some());
            reservation
        };
        let (ttl, turn) = (Span::from_micros(ttl), SlotTurn::at_once());
        let reserve = limiter.reserve(&rules, &mut scratch, &request, ttl, turn, finish);
        self.run(reserve).unwrap()
    }

    pub(crate) fn reserve_counters(
        &self,
        server: usize,
        cost: u64,
        ttl: u64,
    ) -> Option<Reservation> {
        let charges = self.counters().into_iter().map(|key| {
            let (key, limits) = self.key(server, key);
            let cost = Cost::new(cost).unwrap();
            let key = key.into();
            CounterCharge { key, limits, cost }
        });
        let charges: Vec<CounterCharge> = charges.collect();
        let limiter = &self.nodes[server].limiter;
        let reserve = limiter.reserve_counters(&charges, Span::from_micros(ttl), None);
        let reserved = self.run(reserve).unwrap();
        let is_admitted = reserved.decided.decision == Decision::Admitted;
        assert_eq!(is_admitted, reserved.reservation.is_some());
        reserved.reservation
    }

    pub(crate) fn settle(
        &self,
        server: usize,
        token: &str,
        cost: u64,
    ) -> Result<SettledReservation, ReservationError> {
        let limiter = &self.nodes[server].limiter;
        self.run(limiter.settle_reservation(token, cost))
    }

    pub(crate) fn settle_counters(
        &self,
        server: usize,
        token: &str,
        cost: u64,
    ) -> CounterSettlement {
        let limiter = &self.nodes[server].limiter;
        let limits_of = |key: &[u8]| {
            let counter = COUNTERS.iter().position(|(counter, _)| *counter == key)?;
            Some(Arc::clone(&self.counter_limits[counter]))
        };
        self.run(limiter.settle_counters(token, limits_of, cost))
            .unwrap()
    }

    pub(crate) fn renew(
        &self,
        server: usize,
        token: &str,
        ttl: u64,
    ) -> Result<Reservation, ReservationError> {
        let limiter = &self.nodes[server].limiter;
        self.run(limiter.renew_reservation(token, Span::from_micros(ttl)))
    }

    /// Returns the metrics of a server.
    pub(crate) fn exposition(&self, server: usize) -> String {
        self.nodes[server].limiter.exposition()
    }

    /// Returns whether no server knows an outstanding reservation, and the expiry queue is empty.
    pub(crate) fn is_idle(&self) -> bool {
        let is_idle = |node: &Node| {
            let page = node.limiter.exposition();
            page.contains("\ntidegate_reservations_outstanding 0\n")
        };
        self.nodes.iter().all(is_idle)
    }
}

/// Returns the entries of a request of `user`.
fn entries_of(user: usize) -> [(&'static str, &'static str); 2] {
    [("user", USERS[user]), ("device", DEVICES[user])]
}

fn rules(kinds: &[Kind], changes: &[Change]) -> String {
    let rule = |(number, (kind, change)): (usize, (&Kind, &Change))| {
        let cost = if *kind == Kind::Slots {
            "cost: 1, "
        } else {
            ""
        };
        let limits = kind.limits(*change);
        let (key, _) = entries_of(0)[number % 2];
        format!("  - {{name: r{number}, key: {key}, {cost}limits: [{limits}]}}\n")
    };
    let rules: String = kinds.iter().zip(changes).enumerate().map(rule).collect();
    format!("rules:\n{rules}")
}

fn timestamp(micros: u64) -> Timestamp {
    Timestamp::from_micros(micros)
}
