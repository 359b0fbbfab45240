//! Tests of Kuadrant's rate limit service over real sockets.

use std::collections::HashSet;

use futures_util::future::join_all;
use prost_types::Duration;
use tidegate_config::{ReservationsConfig, envoy::RlsSettings};
use tidegate_core::Span;
use tidegate_limiter::reservations::{ReservationError, Reservations};
use tonic::Code as Status;

use crate::{
    client::Client,
    listener::TestListener,
    proto::{
        envoy::{
            extensions::common::ratelimit::v3::{
                RateLimitDescriptor, rate_limit_descriptor::Entry,
            },
            service::ratelimit::v3::{
                RateLimitRequest, RateLimitResponse, rate_limit_response::Code,
            },
        },
        kuadrant::service::ratelimit::v1::{
            CommitRequest, CommitResponse, ReserveRequest, ReserveResponse,
        },
    },
};

const SHOULD: &str = "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit";
const CHECK: &str = "/kuadrant.service.ratelimit.v1.RateLimitService/CheckRateLimit";
const REPORT: &str = "/kuadrant.service.ratelimit.v1.RateLimitService/Report";
const RESERVE: &str = "/kuadrant.service.ratelimit.v1.RateLimitService/Reserve";
const COMMIT: &str = "/kuadrant.service.ratelimit.v1.RateLimitService/Commit";

const LLM: &str = "\
domain: llm
descriptors:
  - {key: user, rate_limit: {unit: minute, requests_per_unit: 100}}
  - {key: team, rate_limit: {unit: day, requests_per_unit: 150}}
  - {key: tiny, rate_limit: {unit: hour, requests_per_unit: 1}}
  - {key: none, rate_limit: {unit: hour, requests_per_unit: 0}}
  - {key: trial, shadow_mode: true, rate_limit: {unit: hour, requests_per_unit: 2}}
";

/// A client of the listener. Each descriptor in the client's requests has one entry.
struct Caller {
    client: Client,
    domain: &'static str,
}

impl Caller {
    async fn of(listener: &TestListener) -> Self {
        Self {
            client: listener.connect().await,
            domain: "llm",
        }
    }

    fn request(&self, keys: &[&str], hits_addend: u32) -> RateLimitRequest {
        RateLimitRequest {
            domain: self.domain.to_owned(),
            descriptors: descriptors(keys),
            hits_addend,
        }
    }

    async fn check(&mut self, keys: &[&str]) -> Code {
        let request = self.request(keys, 0);
        let answer: RateLimitResponse = self.client.call(CHECK, request).await.unwrap();
        answer.overall_code()
    }

    async fn report(&mut self, keys: &[&str], hits: u32) {
        let request = self.request(keys, hits);
        let answer: RateLimitResponse = self.client.call(REPORT, request).await.unwrap();
        assert_eq!(
            answer.overall_code(),
            Code::Ok,
            "reports are always counted"
        );
    }

    async fn reserve(&mut self, keys: &[&str], amount: u64) -> ReserveResponse {
        self.reserve_for(keys, amount, None).await
    }

    async fn reserve_for(
        &mut self,
        keys: &[&str],
        amount: u64,
        ttl: Option<i64>,
    ) -> ReserveResponse {
        let ttl = ttl.map(|seconds| Duration { seconds, nanos: 0 });
        let request = ReserveRequest {
            domain: self.domain.to_owned(),
            descriptors: descriptors(keys),
            amount,
            ttl,
        };
        self.client.call(RESERVE, request).await.unwrap()
    }

    /// Reserves an amount, which must be admitted. Returns the reservation ID.
    async fn reserved(&mut self, keys: &[&str], amount: u64) -> String {
        let answer = self.reserve(keys, amount).await;
        assert_eq!(answer.code(), Code::Ok);
        assert!(!answer.reservation_id.is_empty());
        answer.reservation_id
    }

    async fn commit(&mut self, keys: &[&str], id: &str, actual_amount: u64) -> bool {
        let request = CommitRequest {
            domain: self.domain.to_owned(),
            descriptors: descriptors(keys),
            reservation_id: id.to_owned(),
            actual_amount,
        };
        let answer: CommitResponse = self.client.call(COMMIT, request).await.unwrap();
        answer.reservation_released
    }

    /// Returns the number of remaining hits of `key`, without charging any hits.
    async fn left(&mut self, key: &str) -> u32 {
        let mut request = self.request(&[key], 0);
        request.descriptors[0].hits_addend = Some(0);
        let answer: RateLimitResponse = self.client.call(SHOULD, request).await.unwrap();
        answer.statuses[0].limit_remaining
    }
}

fn descriptors(keys: &[&str]) -> Vec<RateLimitDescriptor> {
    let descriptor = |key: &&str| RateLimitDescriptor {
        entries: vec![Entry {
            key: (*key).to_owned(),
            value: "alice".to_owned(),
        }],
        ..RateLimitDescriptor::default()
    };
    keys.iter().map(descriptor).collect()
}

fn open() -> TestListener {
    TestListener::for_envoy(RlsSettings::default(), LLM)
}

#[tokio::test]
async fn a_check_counts_nothing_and_a_report_checks_nothing() {
    let listener = open();
    let mut caller = Caller::of(&listener).await;
    for _ in 0..5 {
        assert_eq!(caller.check(&["tiny"]).await, Code::Ok);
    }
    caller.report(&["tiny"], 0).await;
    assert_eq!(
        caller.check(&["tiny"]).await,
        Code::OverLimit,
        "0 hits count as 1"
    );
    caller.report(&["user"], 99).await;
    assert_eq!(caller.check(&["user"]).await, Code::Ok);
    assert_eq!(caller.check(&["user", "tiny"]).await, Code::OverLimit);
    caller.report(&["user"], 40).await;
    assert_eq!(caller.check(&["user"]).await, Code::OverLimit);
    assert_eq!(caller.left("user").await, 0);
    // The report was counted beyond the limit: 139 hits are counted. After a refund of 39 hits, the
    // count is exactly the limit.
    let mut refund = caller.request(&["user"], 39);
    refund.descriptors[0].is_negative_hits = true;
    let _: RateLimitResponse = caller.client.call(REPORT, refund).await.unwrap();
    assert_eq!(
        (caller.check(&["user"]).await, caller.left("user").await),
        (Code::OverLimit, 0)
    );
    listener.at_seconds(60);
    assert_eq!(caller.check(&["user"]).await, Code::Ok, "the next window");
    // A rule in shadow mode counts hits, but denies nothing.
    caller.report(&["trial"], 5).await;
    assert_eq!(caller.check(&["trial"]).await, Code::Ok);
    let unknown = ["nobody"];
    assert_eq!(caller.check(&unknown).await, Code::Ok, "no rule applies");
    caller.report(&unknown, 5).await;
}

#[tokio::test]
async fn concurrent_reservations_never_exceed_the_limit() {
    let listener = open();
    let mut callers = Vec::new();
    for _ in 0..5 {
        callers.push(Caller::of(&listener).await.client);
    }
    let each = (0..50).map(|number: usize| {
        let mut caller = Caller {
            client: callers[number % 5].clone(),
            domain: "llm",
        };
        async move { caller.reserve(&["user"], 10).await }
    });
    let answers = join_all(each).await;
    let admitted: HashSet<String> = answers
        .into_iter()
        .filter(|answer| answer.code() == Code::Ok)
        .map(|answer| answer.reservation_id)
        .collect();
    assert_eq!(admitted.len(), 10, "every id is different");
    let mut caller = Caller::of(&listener).await;
    // The 40 denied reservations hold nothing, although the rule counts denied hits.
    for id in &admitted {
        assert!(caller.commit(&["user"], id, 1).await);
    }
    assert_eq!(caller.left("user").await, 90);
}

#[tokio::test]
async fn a_commit_counts_the_actual_amount() {
    let listener = open();
    let mut caller = Caller::of(&listener).await;
    let less = caller.reserved(&["user"], 40).await;
    assert_eq!(caller.left("user").await, 60);
    assert!(caller.commit(&["user"], &less, 15).await);
    assert_eq!(caller.left("user").await, 85);
    let nothing = caller.reserved(&["user"], 50).await;
    assert!(caller.commit(&["user"], &nothing, 0).await);
    assert_eq!(caller.left("user").await, 85);
    let more = caller.reserved(&["user"], 20).await;
    assert!(caller.commit(&["user"], &more, 30).await);
    assert_eq!(caller.left("user").await, 55);
    // The actual amount is counted even beyond the limit: 45 + 80 = 125. After a refund of 20, the
    // count is 105.
    let beyond = caller.reserved(&["user"], 1).await;
    assert!(caller.commit(&["user"], &beyond, 80).await);
    let mut refund = caller.request(&["user"], 20);
    refund.descriptors[0].is_negative_hits = true;
    let _: RateLimitResponse = caller.client.call(REPORT, refund.clone()).await.unwrap();
    assert_eq!(caller.left("user").await, 0);
    refund.hits_addend = 6;
    let _: RateLimitResponse = caller.client.call(REPORT, refund).await.unwrap();
    assert_eq!(caller.left("user").await, 1);
}

#[tokio::test]
async fn a_second_commit_counts_nothing_until_the_reservation_would_have_expired() {
    let listener = open();
    let mut caller = Caller::of(&listener).await;
    let id = caller
        .reserve_for(&["team"], 40, Some(30))
        .await
        .reservation_id;
    assert!(caller.commit(&["team"], &id, 25).await);
    for actual in [25, 40, 60] {
        assert!(!caller.commit(&["team"], &id, actual).await);
        assert_eq!(caller.left("team").await, 125);
    }
    // If the commit is for other counters than the reservation, it is counted as a report, as with
    // Redis.
    assert!(!caller.commit(&["user"], &id, 25).await);
    assert_eq!(caller.left("user").await, 75);
    // The settlement of another reservation drops the IDs of committed reservations that would have
    // expired by now.
    listener.at_seconds(30);
    let other = caller.reserved(&["team"], 5).await;
    assert!(caller.commit(&["team"], &other, 5).await);
    assert!(!caller.commit(&["team"], &id, 25).await);
    assert_eq!(caller.left("team").await, 95, "a late commit is a report");
}

#[tokio::test]
async fn an_id_that_is_not_outstanding_makes_a_commit_a_report() {
    let listener = open();
    let mut caller = Caller::of(&listener).await;
    let id = caller.reserved(&["user"], 40).await;
    let mut forged = id.clone();
    forged.replace_range(10..11, if &id[10..11] == "A" { "B" } else { "A" });
    for wrong in ["", "unknown", "not base64!", &forged] {
        assert!(!caller.commit(&["user"], wrong, 1).await, "{wrong}");
    }
    assert_eq!(
        caller.left("user").await,
        56,
        "40 are held, and 4 were reported"
    );
    // The reservation with this ID holds another counter, or a counter in another domain.
    assert!(!caller.commit(&["team"], &id, 3).await);
    assert_eq!(caller.left("team").await, 147);
    caller.domain = "other";
    assert!(!caller.commit(&["user"], &id, 3).await);
    caller.domain = "llm";
    assert_eq!(caller.left("user").await, 56);
    // A counter that the reservation does not hold is charged as by a report.
    assert!(caller.commit(&["user", "team"], &id, 10).await);
    assert_eq!(
        (caller.left("user").await, caller.left("team").await),
        (86, 137)
    );
}

#[tokio::test]
async fn only_a_commit_settles_a_reservation() {
    let listener = open();
    let limiter = &listener.limiter;
    let mut caller = Caller::of(&listener).await;
    let id = caller.reserved(&["user"], 40).await;
    let settled = limiter.settle_reservation(&id, 0).await;
    assert_eq!(settled, Err(ReservationError::Invalid));
    let renewed = limiter.renew_reservation(&id, Span::from_secs(5)).await;
    assert_eq!(renewed, Err(ReservationError::Invalid));
    assert_eq!(caller.left("user").await, 60);
    assert!(caller.commit(&["user"], &id, 40).await);
    assert_eq!(caller.left("user").await, 60, "the amount is counted once");
}

#[tokio::test]
async fn an_expired_reservation_costs_nothing() {
    let listener = open();
    let mut caller = Caller::of(&listener).await;
    let id = caller
        .reserve_for(&["user"], 40, Some(20))
        .await
        .reservation_id;
    listener.at_seconds(19);
    listener.limiter.expire_reservations().await;
    assert_eq!(caller.left("user").await, 60);
    listener.at_seconds(20);
    listener.limiter.expire_reservations().await;
    assert_eq!(caller.left("user").await, 100);
    assert!(!caller.commit(&["user"], &id, 30).await);
    assert_eq!(caller.left("user").await, 70, "a late commit is a report");
    // The commit of an expired reservation is also a report if the reservation has not been
    // refunded yet.
    let id = caller
        .reserve_for(&["user"], 40, Some(10))
        .await
        .reservation_id;
    listener.at_seconds(30);
    assert!(!caller.commit(&["user"], &id, 5).await);
    assert_eq!(caller.left("user").await, 65);
}

#[tokio::test]
async fn the_time_of_a_reservation_is_clamped() {
    let listener = open();
    let mut caller = Caller::of(&listener).await;
    for ttl in [None, Some(0), Some(3_600), Some(i64::MAX)] {
        caller.reserve_for(&["team"], 10, ttl).await;
    }
    // A reservation ends at the latest with the current window, which ends at 60 s.
    listener.at_seconds(50);
    let windows = caller.reserve_for(&["user", "team"], 10, Some(60)).await;
    assert_eq!(caller.left("team").await, 100);
    listener.at_seconds(59);
    listener.limiter.expire_reservations().await;
    assert_eq!(caller.left("team").await, 100);
    listener.at_seconds(60);
    listener.limiter.expire_reservations().await;
    assert_eq!(caller.left("team").await, 150);
    // The commit is counted in the window in which it arrives.
    assert!(
        !caller
            .commit(&["user", "team"], &windows.reservation_id, 7)
            .await
    );
    assert_eq!(
        (caller.left("user").await, caller.left("team").await),
        (93, 143)
    );
    let negative = ReserveRequest {
        domain: "llm".to_owned(),
        descriptors: descriptors(&["user"]),
        amount: 1,
        ttl: Some(Duration {
            seconds: -1,
            nanos: 0,
        }),
    };
    let refused = caller
        .client
        .call::<_, ReserveResponse>(RESERVE, negative)
        .await;
    assert_eq!(refused.unwrap_err().code(), Status::InvalidArgument);
}

#[tokio::test]
async fn the_amount_of_a_reservation_is_clamped_to_half_of_the_limit() {
    let listener = open();
    let mut caller = Caller::of(&listener).await;
    for (amount, left) in [(51, 50), (u64::MAX, 0)] {
        let answer = caller.reserve(&["user"], amount).await;
        assert_eq!((answer.code(), caller.left("user").await), (Code::Ok, left));
    }
    assert_eq!(caller.reserve(&["user"], 1).await.code(), Code::OverLimit);
    // On each counter, the amount is clamped to half of the counter's own limit.
    listener.at_seconds(60);
    let id = caller.reserved(&["user", "team"], 1_000).await;
    assert_eq!(
        (caller.left("user").await, caller.left("team").await),
        (50, 75)
    );
    assert!(caller.commit(&["user", "team"], &id, 60).await);
    assert_eq!(
        (caller.left("user").await, caller.left("team").await),
        (40, 90)
    );
    // Half of 1 is rounded up, and a limit of 0 admits nothing.
    let tiny = caller.reserved(&["tiny"], 8).await;
    assert_eq!(caller.left("tiny").await, 0);
    assert!(caller.commit(&["tiny"], &tiny, 0).await);
    assert_eq!(caller.reserve(&["none"], 1).await.code(), Code::OverLimit);
}

#[tokio::test]
async fn an_amount_of_0_holds_nothing_and_the_largest_amount_is_counted() {
    let listener = open();
    let mut caller = Caller::of(&listener).await;
    caller.report(&["user"], 100).await;
    let answer = caller.reserve(&["user"], 0).await;
    assert_eq!(
        (answer.code(), answer.reservation_id.as_str()),
        (Code::Ok, "")
    );
    caller.report(&["user"], 1).await;
    assert_eq!(caller.reserve(&["user"], 0).await.code(), Code::OverLimit);
    assert!(!caller.commit(&["team"], "", 0).await);
    assert_eq!(caller.left("team").await, 150);
    let id = caller.reserved(&["team"], u64::MAX).await;
    assert!(caller.commit(&["team"], &id, u64::MAX).await);
    assert!(!caller.commit(&["team"], "", u64::MAX).await);
    assert_eq!(caller.left("team").await, 0);
    assert_eq!(caller.check(&["team"]).await, Code::OverLimit);
}

#[tokio::test]
async fn a_reservation_holds_all_counters_or_none() {
    let listener = open();
    let mut caller = Caller::of(&listener).await;
    caller.report(&["team"], 145).await;
    assert_eq!(
        caller.reserve(&["user", "team"], 10).await.code(),
        Code::OverLimit
    );
    assert_eq!(
        (caller.left("user").await, caller.left("team").await),
        (100, 5)
    );
    let both = ["user", "team"];
    let id = caller.reserved(&both, 5).await;
    assert_eq!(
        (caller.left("user").await, caller.left("team").await),
        (95, 0)
    );
    assert!(caller.commit(&both, &id, 2).await);
    assert_eq!(
        (caller.left("user").await, caller.left("team").await),
        (98, 3)
    );
    // If two descriptors have the same counter, the counter is charged once.
    let id = caller.reserved(&["user", "user"], 8).await;
    assert_eq!(caller.left("user").await, 90);
    assert!(caller.commit(&["user", "user"], &id, 4).await);
    assert_eq!(caller.left("user").await, 94);
    // A rule in shadow mode does not deny a reservation. However, if the rule would have denied the
    // reservation, nothing is held on its counter. The limit of `trial` is 2, so the first and the
    // second reservation hold one unit each, and the third reservation holds none.
    let all = ["trial", "user"];
    let mut ids = Vec::new();
    for _ in 0..3 {
        ids.push(caller.reserved(&all, 10).await);
    }
    assert_eq!(caller.left("trial").await, 0);
    for (id, actual) in ids.iter().zip([0, 0, 10]) {
        assert!(caller.commit(&all, id, actual).await);
    }
    assert_eq!(caller.left("user").await, 84);
    // All 10 hits are counted, so 1 of 2 hits is available after a refund of 9.
    let mut refund = caller.request(&["trial"], 8);
    refund.descriptors[0].is_negative_hits = true;
    let _: RateLimitResponse = caller.client.call(REPORT, refund.clone()).await.unwrap();
    assert_eq!(caller.left("trial").await, 0);
    refund.hits_addend = 1;
    let _: RateLimitResponse = caller.client.call(REPORT, refund).await.unwrap();
    assert_eq!(caller.left("trial").await, 1);
    let none = caller.reserve(&["nobody"], 10).await;
    assert_eq!((none.code(), none.reservation_id.as_str()), (Code::Ok, ""));
}

#[tokio::test]
async fn reservations_and_ordinary_hits_share_the_counters() {
    let listener = open();
    let mut caller = Caller::of(&listener).await;
    let id = caller.reserved(&["user"], 50).await;
    let request = caller.request(&["user"], 60);
    // Hits that `ShouldRateLimit` denies are counted in full, so 110 units are counted.
    let answer: RateLimitResponse = caller.client.call(SHOULD, request).await.unwrap();
    assert_eq!(answer.overall_code(), Code::OverLimit);
    assert!(caller.commit(&["user"], &id, 20).await);
    assert_eq!(caller.left("user").await, 20, "110 - 50 + 20 = 80");
}

#[tokio::test]
async fn requests_that_cannot_be_decided_get_a_code() {
    let listener = open();
    let mut caller = Caller::of(&listener).await;
    caller.domain = "";
    assert_eq!(caller.check(&["user"]).await, Code::Unknown);
    assert_eq!(caller.reserve(&["user"], 1).await.code(), Code::Unknown);
    assert!(!caller.commit(&["user"], "", 1).await);
    caller.domain = "llm";
    let many = ["user"; 513];
    let request = caller.request(&many, 1);
    for path in [CHECK, REPORT] {
        let refused = caller
            .client
            .call::<_, RateLimitResponse>(path, request.clone())
            .await;
        let refused = refused.unwrap_err();
        assert_eq!(refused.code(), Status::InvalidArgument);
        assert!(refused.message().starts_with("descriptors: "), "{refused}");
    }
    let unconfigured = TestListener::without_a_domain(RlsSettings::default());
    let mut caller = Caller::of(&unconfigured).await;
    let request = caller.request(&["user"], 1);
    let refused = caller
        .client
        .call::<_, RateLimitResponse>(CHECK, request)
        .await;
    assert_eq!(refused.unwrap_err().code(), Status::Unknown);
}

/// During an upgrade, the old process answers with a status after which the client may send the
/// call again, to the new process.
#[tokio::test]
async fn a_commit_of_a_moved_reservation_can_be_repeated() {
    let listener = open();
    let mut caller = Caller::of(&listener).await;
    let id = caller.reserved(&["user"], 40).await;
    listener.limiter.send_state(&mut |_, _| Ok(())).unwrap();
    let request = CommitRequest {
        domain: "llm".to_owned(),
        descriptors: descriptors(&["user"]),
        reservation_id: id.clone(),
        actual_amount: 10,
    };
    let moved = caller.client.call::<_, CommitResponse>(COMMIT, request);
    let moved = moved.await.unwrap_err();
    assert_eq!(moved.code(), Status::Unavailable, "{moved}");
    // The new process has failed, so the old process answers the repeated call.
    listener.limiter.take_back_state();
    assert!(caller.commit(&["user"], &id, 10).await);
    assert_eq!(caller.left("user").await, 90);
}

#[tokio::test]
async fn reservations_are_bounded_and_can_be_off() {
    let settings = |max| ReservationsConfig {
        max,
        ..ReservationsConfig::default()
    };
    let bounded = Reservations::new(settings(2), None).unwrap();
    let listener = TestListener::with_reservations(LLM, bounded);
    let mut caller = Caller::of(&listener).await;
    let id = caller.reserved(&["user"], 1).await;
    caller.reserved(&["user"], 1).await;
    let request = ReserveRequest {
        domain: "llm".to_owned(),
        descriptors: descriptors(&["user"]),
        amount: 1,
        ttl: None,
    };
    let full = caller
        .client
        .call::<_, ReserveResponse>(RESERVE, request.clone())
        .await;
    let full = full.unwrap_err();
    assert_eq!(full.code(), Status::Unavailable);
    assert!(full.message().contains("reservations.max"), "{full}");
    assert!(caller.commit(&["user"], &id, 1).await);
    caller.reserved(&["user"], 1).await;

    let off = Reservations::new(settings(0), None).unwrap();
    let listener = TestListener::with_reservations(LLM, off);
    let mut caller = Caller::of(&listener).await;
    let refused = caller
        .client
        .call::<_, ReserveResponse>(RESERVE, request)
        .await;
    assert_eq!(refused.unwrap_err().code(), Status::Unimplemented);
    let commit = CommitRequest {
        domain: "llm".to_owned(),
        descriptors: descriptors(&["user"]),
        reservation_id: id,
        actual_amount: 1,
    };
    let refused = caller
        .client
        .call::<_, CommitResponse>(COMMIT, commit)
        .await;
    assert_eq!(refused.unwrap_err().code(), Status::Unimplemented);
    assert_eq!(caller.check(&["user"]).await, Code::Ok);
}
