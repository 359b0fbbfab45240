//! Compares Kuadrant's reservations with a naive model of RFC 0021. The model has a count for the
//! current window and a list of held amounts.

use futures_util::FutureExt as _;
use proptest::prelude::*;
use tidegate_config::envoy::{DomainFiles, RlsSettings};
use tidegate_core::Span;
use tidegate_envoy::{
    Code, CommitRequest, Descriptor, File, RateLimitRequest, ReserveRequest, read,
};
use tidegate_limiter::metrics::ListenerKind;

use crate::subject::{Started, StoreKind};

/// The first second of a minute.
const START: u64 = 1_700_000_040;

const LIMIT: u64 = 20;

const LLM: &str = "
domain: llm
descriptors: [{key: user, rate_limit: {unit: minute, requests_per_unit: 20}}]
";

#[derive(Clone, Debug)]
enum Step {
    Reserve {
        amount: u64,
        ttl: u64,
    },
    Commit {
        which: usize,
        actual: u64,
    },
    Report(u32),
    /// An ordinary request. The hits of an ordinary request are counted even if it is denied.
    Request(u32),
    /// Advances the clock by this number of seconds.
    Pass(u64),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (0..=LIMIT + 5, 0..90_u64).prop_map(|(amount, ttl)| Step::Reserve { amount, ttl }),
        4 => (0..6_usize, 0..=LIMIT + 5).prop_map(|(which, actual)| Step::Commit { which, actual }),
        1 => (1..6_u32).prop_map(Step::Report),
        1 => (1..6_u32).prop_map(Step::Request),
        2 => (1..25_u64).prop_map(Step::Pass),
    ]
}

#[derive(Debug)]
struct Hold {
    id: String,
    amount: u64,
    expires: u64,
    is_committed: bool,
}

#[derive(Debug, Default)]
struct Model {
    /// The number of seconds since the start.
    now: u64,
    count: u64,
    holds: Vec<Hold>,
}

impl Model {
    fn pass(&mut self, seconds: u64) {
        let window = self.now / 60;
        self.now += seconds;
        if self.now / 60 != window {
            self.count = 0;
        }
    }

    fn is_live(&self, hold: &Hold) -> bool {
        !hold.is_committed && hold.expires > self.now
    }

    fn held(&self) -> u64 {
        let live = self.holds.iter().filter(|hold| self.is_live(hold));
        live.map(|hold| hold.amount).sum()
    }

    fn left(&self) -> u64 {
        LIMIT.saturating_sub(self.count + self.held())
    }

    /// Returns the amount that a reservation of `amount` holds, or `None` if it is denied.
    fn admits(&self, amount: u64) -> Option<u64> {
        let amount = amount.min(LIMIT / 2);
        (self.count + self.held() + amount <= LIMIT).then_some(amount)
    }

    fn expiry(&self, ttl: u64) -> u64 {
        let window_end = (self.now / 60 + 1) * 60;
        let ttl = if ttl == 0 { 60 } else { ttl.min(60) };
        (self.now + ttl).min(window_end)
    }
}

struct Service {
    started: Started,
    model: Model,
}

impl Service {
    fn new() -> Self {
        let settings = RlsSettings::default();
        let started = Started::with(StoreKind::Memory, settings, DomainFiles::One, START);
        let file = File {
            name: "llm.yaml".to_owned(),
            text: LLM.to_owned(),
        };
        started
            .service
            .load(read(vec![file], DomainFiles::One).unwrap());
        Self {
            started,
            model: Model::default(),
        }
    }

    fn reserve(&mut self, amount: u64, ttl: u64) {
        let request = ReserveRequest {
            domain: "llm".to_owned(),
            descriptors: request(0, None).descriptors,
            amount,
            ttl: Some(Span::from_secs(ttl)),
        };
        let service = &self.started.service;
        let reserved = service
            .reserve(ListenerKind::Grpc, request, None)
            .now_or_never();
        let reserved = reserved.unwrap().unwrap();
        let admitted = self.model.admits(amount);
        let expected = admitted.map_or(Code::OverLimit, |_| Code::Ok);
        assert_eq!(reserved.code, expected, "{:?}", self.model);
        assert_eq!(
            reserved.reservation_id.is_empty(),
            admitted.is_none_or(|held| held == 0)
        );
        if let Some(amount @ 1..) = admitted {
            self.model.holds.push(Hold {
                id: reserved.reservation_id,
                amount,
                expires: self.model.expiry(ttl),
                is_committed: false,
            });
        }
    }

    fn commit(&mut self, which: usize, actual: u64) {
        let Some(hold) = self.model.holds.get(which) else {
            return;
        };
        let is_live = self.model.is_live(hold);
        // The service may discard a committed reservation at any time after the reservation would
        // have expired, so the result is unknown.
        if hold.is_committed && hold.expires <= self.model.now {
            return;
        }
        let request = CommitRequest {
            domain: "llm".to_owned(),
            descriptors: request(0, None).descriptors,
            reservation_id: hold.id.clone(),
            actual_amount: actual,
        };
        let committed = self.started.service.commit(request, None).now_or_never();
        assert_eq!(committed.unwrap().unwrap(), is_live, "{:?}", self.model);
        if !hold.is_committed {
            self.model.count += actual;
            self.model.holds[which].is_committed |= is_live;
        }
    }

    fn report(&mut self, hits: u32) {
        let reported = self
            .started
            .service
            .report(&request(hits, None), None)
            .now_or_never();
        reported.unwrap().unwrap();
        self.model.count += u64::from(hits);
    }

    fn ask(&mut self, hits: u32) {
        let request = request(hits, None);
        let answer = self
            .started
            .service
            .should_rate_limit(&request)
            .now_or_never();
        let fits = self.model.count + self.model.held() + u64::from(hits) <= LIMIT;
        let expected = if fits { Code::Ok } else { Code::OverLimit };
        assert_eq!(answer.unwrap().unwrap().overall_code, expected);
        self.model.count += u64::from(hits);
    }

    fn pass(&mut self, seconds: u64) {
        self.model.pass(seconds);
        self.started.set(START + self.model.now);
        let expiry = self.started.limiter.expire_reservations();
        expiry.now_or_never().unwrap();
    }

    fn left(&self) -> u64 {
        let request = request(0, Some(0));
        let answer = self
            .started
            .service
            .should_rate_limit(&request)
            .now_or_never();
        answer.unwrap().unwrap().statuses[0].limit_remaining.into()
    }
}

fn request(hits_addend: u32, of_descriptor: Option<u64>) -> RateLimitRequest {
    let descriptor = Descriptor {
        entries: vec![("user".to_owned(), "alice".to_owned())],
        hits_addend: of_descriptor,
        ..Descriptor::default()
    };
    RateLimitRequest {
        domain: "llm".to_owned(),
        descriptors: vec![descriptor],
        hits_addend,
    }
}

proptest! {
    #[test]
    fn reservations_follow_the_model(steps in prop::collection::vec(step(), 1..60)) {
        let mut service = Service::new();
        for step in steps {
            match step {
                Step::Reserve { amount, ttl } => service.reserve(amount, ttl),
                Step::Commit { which, actual } => service.commit(which, actual),
                Step::Report(hits) => service.report(hits),
                Step::Request(hits) => service.ask(hits),
                Step::Pass(seconds) => service.pass(seconds),
            }
            prop_assert_eq!(service.left(), service.model.left(), "{:?}", service.model);
        }
    }
}
