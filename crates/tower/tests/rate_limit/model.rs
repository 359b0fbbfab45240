//! Compares the layer with a simple model. Requests arrive, end and are cancelled in any order.

use std::{convert::Infallible, future, sync::Arc};

use bytes::Bytes;
use futures_util::FutureExt;
use http::{Request, Response};
use http_body_util::{BodyExt, Full};
use proptest::prelude::*;
use tidegate::RateLimiter;
use tidegate_core::{Cost, Effect, Scratch};
use tidegate_tower::{LimitedBody, RateLimitLayer};
use tower::{Layer, Service, service_fn};

use crate::{
    settlement::{counting, places},
    support::{Limiter, fixed, get, limiter},
};

const PLACES: usize = 3;
const FAILURES: usize = 12;

#[derive(Clone, Debug)]
enum Step {
    /// Sends a request whose response has this status.
    Ask(u16),
    /// Sends a request and cancels it before its response.
    GiveUp,
    /// Reads one of the pending responses to its end, or drops it unread.
    End { which: usize, is_read: bool },
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        4 => prop::sample::select(vec![200, 401]).prop_map(Step::Ask),
        1 => Just(Step::GiveUp),
        4 => (any::<usize>(), any::<bool>())
            .prop_map(|(which, is_read)| Step::End { which, is_read }),
    ];
    prop::collection::vec(step, 0..60)
}

async fn answer(request: Request<()>) -> Result<Response<Full<Bytes>>, Infallible> {
    let status = request.uri().path()[1..].parse::<u16>();
    let Ok(status) = status else {
        return future::pending().await;
    };
    let response = Response::builder().status(status).body(Full::from("body"));
    Ok(response.unwrap())
}

/// Returns the remaining units of each rule.
fn left(limiter: &Limiter) -> Vec<u64> {
    let request = tidegate_core::Request::new(&[], Cost::ONE).unwrap();
    let (rules, mut scratch) = (limiter.rules(), Scratch::default());
    let looked = limiter.check(&rules, &mut scratch, &request, Effect::Look);
    let verdict = looked.ready().unwrap().unwrap();
    let lines = verdict.lines.iter();
    lines.map(|line| line.outcome.remaining).collect()
}

/// The state of the model: the pending responses, and the number of failures.
#[derive(Default)]
struct Model {
    underway: Vec<(u16, LimitedBody<Full<Bytes>>)>,
    failed: usize,
}

impl Model {
    /// Returns whether the model admits a request. A pending request counts as a failure, because
    /// it may still fail.
    fn admits(&self) -> bool {
        self.underway.len() < PLACES && self.failed + self.underway.len() < FAILURES
    }

    fn left(&self) -> Vec<u64> {
        let underway = self.underway.len();
        let left = [PLACES - underway, FAILURES - self.failed - underway];
        left.map(|left| left as u64).to_vec()
    }
}

proptest! {
    #[test]
    fn permits_and_failures_match_the_model(steps in steps()) {
        let limiter = limiter(vec![
            places(PLACES as u64),
            counting(fixed("failed", &format!("{FAILURES}/h")), "status", "401"),
        ]);
        let mut service = RateLimitLayer::new(Arc::clone(&limiter)).layer(service_fn(answer));
        let mut model = Model::default();
        for step in steps {
            let admits = model.admits();
            // The client has caused its own failures, so their limit denies with 429. The client
            // has not caused the service to be at capacity, so that denial is a 503.
            let spent = model.failed + model.underway.len() >= FAILURES;
            let denied = if spent { 429 } else { 503 };
            match step {
                Step::Ask(status) => {
                    let asked = service.call(get(&format!("/{status}")));
                    let response = asked.now_or_never().unwrap().unwrap();
                    let expected = if admits { status } else { denied };
                    prop_assert_eq!(response.status().as_u16(), expected);
                    if admits {
                        model.underway.push((status, response.into_body()));
                    }
                }
                Step::GiveUp => {
                    let asked = service.call(get("/never")).now_or_never();
                    prop_assert_eq!(asked.is_none(), admits);
                    model.failed += usize::from(admits);
                }
                Step::End { which, is_read } if !model.underway.is_empty() => {
                    let (status, body) = model.underway.swap_remove(which % model.underway.len());
                    if is_read {
                        body.collect().now_or_never().unwrap().unwrap();
                    } else {
                        drop(body);
                    }
                    model.failed += usize::from(status == 401);
                }
                Step::End { .. } => {}
            }
            prop_assert_eq!(left(&limiter), model.left());
        }
    }
}
