//! A thousand clients that each send one request at the same time, to a server that admits a
//! hundred per second.
//!
//! The clients use this crate's [`RetryPolicy`], and the server Tidegate's own limit. There is no
//! clock, and randomness comes only from a fixed seed, so every run has the same result.

use std::{cmp::Reverse, collections::BinaryHeap};

use http::{HeaderMap, StatusCode};
use tidegate_client::{
    Advice, Backoff, Jitter, RetryBudget, RetryPolicy, Rng, Span, Timestamp,
    retry::{Attempt, Next, Safety, Seen},
};
use tidegate_core::{
    AlgorithmName, Charge, Cost, Effect, LimitSpec, Limits, MemoryBounds, MemoryStore, Rate,
    Verdict,
};
use tidegate_http::HeaderWriter;

pub(crate) const CLIENTS: u32 = 1_000;
/// When all clients send their first request.
const BEGIN: Timestamp = Timestamp::from_micros(1_700_000_000_000_000);
/// The time that one bar covers.
pub(crate) const BAR: Span = Span::from_millis(200);

/// How the clients treat `Retry-After`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Listening {
    /// They ignore it, and only use their backoff.
    No,
    /// They wait for that time, and then for their backoff.
    Yes,
}

/// One run: the requests in the time of each bar, and their outcomes.
#[derive(Debug)]
pub(crate) struct Herd {
    pub(crate) jitter: Jitter,
    pub(crate) listening: Listening,
    /// Admitted and refused requests.
    pub(crate) bars: Vec<(u32, u32)>,
    pub(crate) refused: u32,
    /// When the last request was admitted.
    pub(crate) done: Span,
}

/// Runs every kind of jitter, with and without `Retry-After`.
pub(crate) fn all() -> Vec<Herd> {
    let kinds = [Jitter::None, Jitter::Equal, Jitter::Full];
    let with = |listening| kinds.map(|jitter| run(jitter, listening));
    [Listening::No, Listening::Yes]
        .into_iter()
        .flat_map(with)
        .collect()
}

fn run(jitter: Jitter, listening: Listening) -> Herd {
    let mut clients = Clients::new(jitter);
    let mut server = Server::new();
    let mut herd = Herd {
        jitter,
        listening,
        bars: Vec::new(),
        refused: 0,
        done: Span::ZERO,
    };
    let mut coming: BinaryHeap<_> = (0..CLIENTS)
        .map(|client| Reverse((BEGIN, client, 1)))
        .collect();
    while let Some(Reverse((now, client, number))) = coming.pop() {
        let (status, headers) = server.answer(now);
        herd.count(status, now);
        let advice = match listening {
            Listening::No => Advice::default(),
            Listening::Yes => Advice::of(status, &headers, now),
        };
        let seen = Seen::Answer {
            status,
            headers: &headers,
        };
        if let Some(after) = clients.next(number, seen, advice, now) {
            coming.push(Reverse((now.after(after), client, number + 1)));
        }
    }
    herd
}

impl Herd {
    fn count(&mut self, status: StatusCode, now: Timestamp) {
        let since = now.since(BEGIN);
        let bar = usize::try_from(since.as_micros() / BAR.as_micros()).unwrap_or(usize::MAX);
        if self.bars.len() <= bar {
            self.bars.resize(bar + 1, (0, 0));
        }
        let (admitted, refused) = &mut self.bars[bar];
        if status.is_success() {
            *admitted += 1;
            self.done = since;
        } else {
            *refused += 1;
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
            // Every client has a single request, so the budget must not limit its retries.
            budget: RetryBudget::new(Span::from_secs(10), u32::MAX, 0),
            rng: Rng::with_seed(2023),
        }
    }

    fn next(
        &mut self,
        number: u32,
        seen: Seen<'_>,
        advice: Advice,
        now: Timestamp,
    ) -> Option<Span> {
        let attempt = Attempt {
            number,
            began: BEGIN,
            safety: Safety::Idempotent,
            seen,
            advice,
            replayable: true,
        };
        match self
            .policy
            .next(&attempt, &mut self.budget, &mut self.rng, now)
        {
            Next::Retry { after } => Some(after),
            Next::Done | Next::GiveUp(_) => None,
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

    fn answer(&mut self, now: Timestamp) -> (StatusCode, HeaderMap) {
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
