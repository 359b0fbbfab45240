//! Tests of quotas that two Envoys share.

use crate::support::{Ask, EVERY_LISTENER, Envoy, Scratch, Server, repository};

/// The quota's number of requests per year. The window is so long that it does not end during the
/// test.
const LIMIT: usize = 500;

/// The number of requests beyond the limit that Envoy may admit between its usage report and the
/// resulting quota assignment.
const SLACK: usize = LIMIT / 100;

/// After this number of seconds without an allowed request, both Envoys have sent two reports.
const QUIET_SECONDS: u64 = 12;

/// The timeout for the next allowed request while the budget is not used up. The machine may be
/// busy, so a report may be late.
const STALLED_SECONDS: u64 = 60;

#[test]
#[expect(
    clippy::disallowed_methods,
    reason = "Envoy's report interval of five seconds cannot be shortened"
)]
fn two_envoys_share_a_budget_to_the_last_request() {
    let quotas = format!(
        "{EVERY_LISTENER}quotas:\n  - {{name: keys, domain: shop, bucket: {{api_key: '*'}}, limit: {LIMIT}/366d}}\n"
    );
    let tidegate = Server::start_in(Scratch::new(), &quotas);
    let bootstrap =
        std::fs::read_to_string(repository().join("examples/envoy/envoy.yaml")).unwrap();
    // In the example, Envoy allows all requests until it receives its first quota assignment. In
    // this test, Envoy denies all requests until then.
    let before = "no_assignment_behavior: {fallback_rate_limit: {blanket_rule: ";
    let bootstrap = bootstrap.replace(&format!("{before}ALLOW_ALL"), &format!("{before}DENY_ALL"));
    let envoys = [(); 2].map(|()| Envoy::start(&bootstrap, tidegate.grpc));
    let fronts = envoys.each_ref().map(|envoy| envoy.listener("quotas"));

    let mut passed = [0, 0];
    let mut last = std::time::Instant::now();
    let longest = |passed: &[usize; 2]| {
        if passed.iter().sum::<usize>() < LIMIT {
            STALLED_SECONDS
        } else {
            QUIET_SECONDS
        }
    };
    while last.elapsed().as_secs() < longest(&passed) {
        for (front, passed) in fronts.iter().zip(&mut passed) {
            let answer = Ask::get(*front, "/").header("x-api-key", "alice").send();
            match answer.status {
                200 => {
                    *passed += 1;
                    last = std::time::Instant::now();
                }
                status => assert_eq!(status, 429),
            }
        }
        assert!(passed[0] + passed[1] <= LIMIT + SLACK, "{passed:?} passed");
    }
    let total = passed[0] + passed[1];
    assert!(
        (LIMIT..=LIMIT + SLACK).contains(&total),
        "{passed:?} passed"
    );
    assert!(
        passed.iter().all(|&passed| passed > LIMIT / 100),
        "{passed:?} passed"
    );
}
