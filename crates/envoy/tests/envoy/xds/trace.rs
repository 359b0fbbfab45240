//! Random traces: resources are added, changed and removed, responses are rejected, and streams and
//! connections are closed. After each step, the client's messages and the decisions must agree with
//! a simple model.

use std::collections::BTreeMap;

use tidegate_envoy::{Descriptor, RateLimitRequest};
use tonic::Status;

use super::{
    control_plane::{AdsStream, ControlPlane, RunningClient, packed},
    protocol::{limiting, started},
};
use crate::subject::Started;

const DOMAINS: [&str; 4] = ["a", "b", "c", "d"];
const TRACES: u64 = 5;
const STEPS: u32 = 40;

/// The SplitMix64 generator, which gives the same numbers on every machine.
struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % end
    }

    fn index(&mut self, len: usize) -> usize {
        usize::try_from(self.below(len as u64)).unwrap()
    }
}

/// The expected active configuration.
#[derive(Default)]
struct Model {
    limits: BTreeMap<&'static str, u32>,
    hits: BTreeMap<&'static str, u32>,
    version: String,
}

impl Model {
    /// Sends one request for each domain, and compares the limit and the remaining hits with the
    /// model.
    async fn verify(&mut self, started: &Started) {
        for domain in DOMAINS {
            let entries = vec![("user".into(), "u".into())];
            let request = RateLimitRequest {
                domain: domain.into(),
                descriptors: vec![Descriptor {
                    entries,
                    ..Descriptor::default()
                }],
                hits_addend: 1,
            };
            let answer = started.service.should_rate_limit(&request).await;
            let answer = answer.map_err(|error| error.to_string());
            if self.version.is_empty() {
                let expected = Err("no rate limit configuration loaded".to_owned());
                assert_eq!(answer, expected);
                continue;
            }
            let status = answer.unwrap().statuses.remove(0);
            let found = status.current_limit.map(|limit| limit.requests_per_unit);
            assert_eq!(found, self.limits.get(domain).copied(), "{domain}");
            if let Some(limit) = found {
                let hits = self.hits.entry(domain).or_default();
                *hits += 1;
                assert_eq!(
                    status.limit_remaining,
                    limit.saturating_sub(*hits),
                    "{domain}"
                );
            }
        }
    }
}

async fn run(seed: u64) {
    let mut random = Random(seed);
    let mut plane = ControlPlane::start().await;
    let started = started();
    let _client = RunningClient::start(plane.config(), &started.service);
    let mut stream = plane.accept().await;
    stream.subscription("").await;
    let mut model = Model::default();
    for step in 0..STEPS {
        match random.below(10) {
            0..=4 => respond(step, &mut random, &mut model, &mut stream).await,
            5 | 6 => reject(step, &mut random, &model, &mut stream).await,
            end => {
                match end {
                    7 => drop(stream),
                    8 => stream.fail(Status::unavailable("restart")).await,
                    _ => stream.break_connection(),
                }
                stream = plane.accept().await;
                stream.subscription(&model.version).await;
            }
        }
        model.verify(&started).await;
    }
}

/// Sends a valid response with random resources.
async fn respond(step: u32, random: &mut Random, model: &mut Model, stream: &mut AdsStream) {
    let domains = DOMAINS.iter().filter(|_| random.below(3) > 0);
    let domains: Vec<&str> = domains.copied().collect();
    let limits = domains.into_iter().map(|domain| {
        let limit = 1 + u32::try_from(random.below(200)).unwrap();
        (domain, limit)
    });
    model.limits = limits.collect();
    let resources = model.limits.iter();
    let resources = resources.map(|(domain, limit)| packed(&limiting(domain, *limit)));
    let version = format!("v{step}");
    let sent = (version.as_str(), &*format!("n{step}"), &*model.version);
    stream.send(sent, resources.collect()).await.unwrap();
    model.version = version;
}

/// Sends a response with an error in one of its resources.
async fn reject(step: u32, random: &mut Random, model: &Model, stream: &mut AdsStream) {
    let mut resources: Vec<_> = DOMAINS.map(|domain| limiting(domain, 7)).into();
    let at = random.index(resources.len());
    let expected = match random.below(3) {
        0 => {
            resources[at].domain.clear();
            "cannot have empty domain"
        }
        1 => {
            resources[at].descriptors[0]
                .rate_limit
                .as_mut()
                .unwrap()
                .unit = 77;
            "invalid rate limit unit '77'"
        }
        _ => {
            let twice = resources[at].clone();
            resources.push(twice);
            "duplicate domain"
        }
    };
    let resources = resources.iter().map(packed).collect();
    let sent = (&*format!("v{step}"), &*format!("n{step}"), &*model.version);
    let error = stream.send(sent, resources).await.unwrap_err();
    assert!(error.contains(expected), "{expected}: {error}");
}

#[tokio::test]
async fn random_traces_agree_with_the_model() {
    for seed in 0..TRACES {
        println!("seed {seed}");
        run(seed).await;
    }
}
