//! Simulates a thousand clients and a server that admits a hundred requests per second. Each client
//! has one request, and all clients send their requests at the same time.
//!
//! The clients use this crate's [`RetryPolicy`], and the server uses Tidegate's limits. The
//! simulation reads no clock, and takes random numbers from a fixed seed, so every run has the same
//! result.

use std::{cmp::Reverse, collections::BinaryHeap};

use http::{HeaderMap, StatusCode};
use tidegate_client::{
    Advice, Backoff, Jitter, RetryBudget, RetryPolicy, Rng, Span, Timestamp,
    retry::{Attempt, AttemptOutcome, Idempotency, RetryDecision},
};
use tidegate_core::{
    AlgorithmName, Charge, Cost, Effect, LimitSpec, Limits, MemoryBounds, MemoryStore, Rate,
    Verdict,
};
use tidegate_tower::HeaderWriter;

pub(crate) const CLIENTS: u32 = 1_000;
/// The time at which all clients send their first request.
const BEGIN: Timestamp = Timestamp::from_micros(1_700_000_000_000_000);
/// The time covered by one bar.
pub(crate) const BAR_TIME: Span = Span::from_millis(200);

/// How the clients react to `Retry-After`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RetryAfter {
    /// The clients ignore `Retry-After`, and wait only for their backoff.
    Ignored,
    /// The clients wait for the time in `Retry-After`, and then for their backoff.
    Honored,
}

/// The result of one run: the number of requests in each bar, by outcome.
#[derive(Debug)]
pub(crate) struct Herd {
    pub(crate) jitter: Jitter,
    pub(crate) retry_after: RetryAfter,
    pub(crate) bars: Vec<Bar>,
    pub(crate) refused: u32,
    /// The time at which the last request was admitted, measured from the start of the run.
    pub(crate) done: Span,
}

/// The number of requests in the time span of one bar, by outcome.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Bar {
    pub(crate) admitted: u32,
    pub(crate) refused: u32,
}

impl Bar {
    pub(crate) fn requests(self) -> u32 {
        self.admitted + self.refused
    }
}

/// Simulates every kind of jitter, with and without `Retry-After`.
pub(crate) fn all() -> Vec<Herd> {
    let kinds = [Jitter::None, Jitter::Equal, Jitter::Full];
    let with = |retry_after| kinds.map(|jitter| run(jitter, retry_after));
    [RetryAfter::Ignored, RetryAfter::Honored]
        .into_iter()
        .flat_map(with)
        .collect()
}

fn run(jitter: Jitter, retry_after: RetryAfter) -> Herd {
    let mut clients = Clients::new(jitter);
    let mut server = Server::new();
    let mut herd = Herd {
        jitter,
        retry_after,
        bars: Vec::new(),
        refused: 0,
        done: Span::ZERO,
    };
    let mut due: BinaryHeap<_> = (0..CLIENTS)
        .map(|client| Reverse((BEGIN, client, 1)))
        .collect();
    while let Some(Reverse((now, client, number))) = due.pop() {
        let (status, headers) = server.respond(now);
        herd.count(status, now);
        let advice = match retry_after {
            RetryAfter::Ignored => Advice::default(),
            RetryAfter::Honored => Advice::from_response(status, &headers, now),
        };
        let outcome = AttemptOutcome::Response {
            status,
            headers: &headers,
        };
        if let Some(after) = clients.decide(number, outcome, advice, now) {
            due.push(Reverse((now.after(after), client, number + 1)));
        }
    }
    herd
}

impl Herd {
    fn count(&mut self, status: StatusCode, now: Timestamp) {
        let since = now.since(BEGIN);
        let number =
            usize::try_from(since.as_micros() / BAR_TIME.as_micros()).unwrap_or(usize::MAX);
        if self.bars.len() <= number {
            self.bars.resize(number + 1, Bar::default());
        }
        let bar = &mut self.bars[number];
        if status.is_success() {
            bar.admitted += 1;
            self.done = since;
        } else {
            bar.refused += 1;
            self.refused += 1;
        }
    }
}

struct Clients {
    policy: RetryPolicy,
    budget: RetryBudget,
    rng: Rng,
}

impl Clients {
    fn new(jitter: Jitter) -> Self {
        let policy = RetryPolicy {
            backoff: Backoff::new(Span::from_millis(100), Span::from_secs(5), jitter),
            max_tries: u32::MAX,
            deadline: Span::from_secs(3_600),
            ..RetryPolicy::default()
        };
        Self {
            policy,
            // The budget must not limit the retries, because every client has only a single
            // request.
            budget: RetryBudget::new(Span::from_secs(10), u32::MAX, 0),
            rng: Rng::with_seed(2023),
        }
    }

    fn decide(
        &mut self,
        number: u32,
        outcome: AttemptOutcome<'_>,
        advice: Advice,
        now: Timestamp,
    ) -> Option<Span> {
        let attempt = Attempt {
            number,
            call_started_at: BEGIN,
            idempotency: Idempotency::Idempotent,
            outcome,
            advice,
            replayable: true,
        };
        match self
            .policy
            .decide(&attempt, &mut self.budget, &mut self.rng, now)
        {
            RetryDecision::Retry { after } => Some(after),
            RetryDecision::Done | RetryDecision::GiveUp(_) => None,
        }
    }
}

/// A server that admits a hundred requests per second, with a burst of a hundred.
struct Server {
    store: MemoryStore,
    limits: Limits,
    headers: HeaderWriter,
}

impl Server {
    fn new() -> Self {
        let rate = Rate {
            count: 100,
            period: Span::from_secs(1),
        };
        let limit = LimitSpec::shorthand(rate, AlgorithmName::TokenBucket).build();
        let limit = limit.expect("100/s is a limit");
        Self {
            store: MemoryStore::new(MemoryBounds::default()),
            limits: Limits::new(vec![limit]).expect("one is enough"),
            headers: HeaderWriter::default(),
        }
    }

    fn respond(&mut self, now: Timestamp) -> (StatusCode, HeaderMap) {
        let mut outcomes = Vec::new();
        let charge = Charge::new(b"everybody", &self.limits, Cost::ONE);
        let charges = [charge.expect("the key is short enough")];
        let decision = self
            .store
            .check(&charges, now, Effect::Charge, &mut outcomes);
        let verdict = Verdict::of(&decision, &charges, &outcomes);
        let mut headers = HeaderMap::new();
        self.headers.write(&verdict, now, &mut headers);
        let status = if verdict.allowed {
            StatusCode::OK
        } else {
            StatusCode::TOO_MANY_REQUESTS
        };
        (status, headers)
    }
}
