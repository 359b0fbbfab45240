//! Random traces: resources are added, changed and removed, responses are rejected, and streams and
//! connections are closed. After each step, the client's messages and the decisions must agree with
//! a simple model.

use std::collections::BTreeMap;

use tidegate_envoy::{Descriptor, RateLimitRequest};

use super::{
    control_plane::{ControlPlane, RunningClient},
    convert::Resource,
    plane::{End, Plane, Response, Sent, Stream as _},
    protocol::started,
    python::PythonPlane,
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
    fn activate(&mut self, version: &str, limits: BTreeMap<&'static str, u32>) {
        version.clone_into(&mut self.version);
        self.limits = limits;
    }

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

/// A client, and its open stream at the control plane.
struct Trace<'p, P: Plane> {
    plane: &'p mut P,
    stream: P::Stream,
    random: Random,
    model: Model,
    /// The version of the current step.
    version: String,
}

impl<'p, P: Plane> Trace<'p, P> {
    /// Runs one trace with a new client.
    async fn run(plane: &'p mut P, seed: u64) {
        let started = started();
        let _client = RunningClient::start(plane.config(), &started.service);
        let mut stream = plane.accept().await;
        stream.subscribe("").await;
        let mut trace = Self {
            plane,
            stream,
            random: Random(seed),
            model: Model::default(),
            version: String::new(),
        };
        for step in 0..STEPS {
            trace.version = format!("v{step}");
            match trace.random.below(14) {
                0..=4 => trace.publish().await,
                5 | 6 => trace.reject().await,
                7 => trace.publish_twice().await,
                8 => trace.publish_after_another_type().await,
                9 => trace.interrupt().await,
                10 => trace.reconnect(End::Closed).await,
                11 | 12 => trace.reconnect(End::Failed).await,
                _ => trace.reconnect(End::Broken).await,
            }
            trace.model.verify(&started).await;
        }
    }

    /// Returns a random nonce. Nonces repeat, and the client must return the one of each response.
    fn nonce(&mut self) -> String {
        format!("n{}", self.random.below(8))
    }

    fn random_limits(&mut self) -> BTreeMap<&'static str, u32> {
        let domains = DOMAINS.into_iter();
        let present: Vec<_> = domains.filter(|_| self.random.below(3) > 0).collect();
        let limits = present.into_iter().map(|domain| {
            let limit = 1 + u32::try_from(self.random.below(200)).unwrap();
            (domain, limit)
        });
        limits.collect()
    }

    /// Publishes random resources. Some of the previous resources are changed or removed.
    async fn publish(&mut self) {
        let (limits, nonce) = (self.random_limits(), self.nonce());
        let sent = sent(&self.version, &nonce, &self.model);
        let resources = resources(&limits);
        self.stream.publish(&sent, &resources).await.unwrap();
        self.model.activate(&self.version, limits);
    }

    /// Publishes twice without waiting for the answer in between.
    async fn publish_twice(&mut self) {
        for part in ["first", "second"] {
            let limits = self.random_limits();
            let version = format!("{} {part}", self.version);
            let sent = sent(&version, part, &self.model);
            let resources = resources(&limits);
            self.stream.respond(&sent.response(&resources)).await;
            self.model.activate(&version, limits);
        }
        for part in ["first", "second"] {
            let version = format!("{} {part}", self.version);
            let sent = sent(&version, part, &self.model);
            self.stream.request().await.answer_to(&sent).unwrap();
        }
    }

    /// Sends a response with another resource type, which the client does not answer, and then
    /// publishes resources.
    async fn publish_after_another_type(&mut self) {
        let sent = sent("another", "another", &self.model);
        let response = Response {
            type_url: "type.googleapis.com/envoy.config.cluster.v3.Cluster",
            ..sent.response(&[])
        };
        self.stream.respond(&response).await;
        self.publish().await;
    }

    /// Sends a response with an error in one of its resources.
    async fn reject(&mut self) {
        let limiting = |domain, unit| Resource::limiting(domain, 7, unit);
        let mut resources: Vec<_> = DOMAINS.map(|domain| limiting(domain, "hour")).into();
        let at = self.random.index(resources.len());
        let expected = match self.random.below(3) {
            0 => {
                resources[at] = limiting("", "hour");
                "cannot have empty domain"
            }
            1 => {
                resources[at] = limiting(DOMAINS[at], "77");
                "invalid rate limit unit '77'"
            }
            _ => {
                resources.push(limiting(DOMAINS[at], "hour"));
                "duplicate domain"
            }
        };
        let nonce = self.nonce();
        let sent = sent(&self.version, &nonce, &self.model);
        let error = self.stream.publish(&sent, &resources).await.unwrap_err();
        assert!(error.contains(expected), "{expected}: {error}");
    }

    /// Sends a response and breaks the connection. The client may have received the response.
    async fn interrupt(&mut self) {
        let (limits, nonce) = (self.random_limits(), self.nonce());
        let sent = sent(&self.version, &nonce, &self.model);
        let resources = resources(&limits);
        self.stream.respond(&sent.response(&resources)).await;
        self.stream.end(End::Broken).await;
        self.stream = self.plane.accept().await;
        let request = self.stream.request().await;
        if request.version == self.version {
            self.model.activate(&self.version, limits);
        }
        request.assert_subscribes(&self.model.version);
    }

    async fn reconnect(&mut self, end: End) {
        self.stream.end(end).await;
        self.stream = self.plane.accept().await;
        self.stream.subscribe(&self.model.version).await;
    }
}

fn sent<'a>(version: &'a str, nonce: &'a str, model: &'a Model) -> Sent<'a> {
    Sent {
        version,
        nonce,
        before: &model.version,
    }
}

fn resources(limits: &BTreeMap<&'static str, u32>) -> Vec<Resource> {
    let limits = limits.iter();
    limits
        .map(|(domain, limit)| Resource::limiting(domain, *limit, "minute"))
        .collect()
}

#[expect(clippy::print_stdout, reason = "a failing trace names its seed")]
async fn random_traces_agree_with_the_model<P: Plane>() {
    let mut plane = P::start().await;
    for seed in 0..TRACES {
        println!("seed {seed}");
        Trace::run(&mut plane, seed).await;
    }
}

#[tokio::test]
async fn random_traces_from_rust_agree_with_the_model() {
    random_traces_agree_with_the_model::<ControlPlane>().await;
}

#[tokio::test]
async fn random_traces_from_python_agree_with_the_model() {
    random_traces_agree_with_the_model::<PythonPlane>().await;
}
