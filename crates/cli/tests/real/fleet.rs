//! Tests of four nodes that share a Redis.

use serde_json::json;

use crate::{
    servers::{RedisServer, eventually},
    support::{Ask, EVERY_LISTENER, Scratch, Server, assert_script_passes, repository},
};

const SERVERS: usize = 4;

fn fleet(redis: &RedisServer, more: &str, rules: &str) -> Vec<Server> {
    let store = format!("store: {{redis: \"{}\", timeout: 2s{more}}}\n", redis.url());
    let config = format!("{EVERY_LISTENER}{store}{rules}");
    let servers: Vec<Server> = (0..SERVERS)
        .map(|_| Server::start_in(Scratch::new(), &config))
        .collect();
    for server in &servers {
        until_exact(server);
    }
    servers
}

/// Waits until the server is connected to Redis.
pub(crate) fn until_exact(server: &Server) {
    eventually("the server is connected to Redis", || {
        Ask::get(server.admin, "/readyz")
            .send()
            .body
            .contains("\"up\":1")
            .then_some(())
    });
}

/// While Redis is unreachable, a server still lists its own top talkers, but not the blocks.
#[test]
fn the_overview_of_top_talkers_has_a_note_in_place_of_the_blocks() {
    let redis = RedisServer::start();
    let store = format!("store: {{redis: \"{}\"}}\n", redis.url());
    let rules = "rules: [{name: api, key: [user], limits: [9/h]}]\n";
    let server = Server::start_in(Scratch::new(), &format!("{EVERY_LISTENER}{store}{rules}"));
    until_exact(&server);
    server.check(&json!({"user": "acme"}));
    drop(redis);
    let output = server.operate(&["top", "api", "--over", "all"]);
    assert!(output.status.success(), "{output:?}");
    let shown = String::from_utf8(output.stdout).unwrap();
    assert_eq!(shown.matches("acme").count(), 4, "{shown}");
    assert!(shown.contains("note: cannot list the blocks: "), "{shown}");
}

#[test]
fn four_servers_together_admit_one_limit_for_every_algorithm() {
    hammer(&["--skewed"]);
}

#[test]
fn four_servers_on_a_cluster_together_admit_one_limit() {
    hammer(&["--cluster"]);
}

/// Runs `scripts/hammer/run` briefly. On a busy machine, the requests may not exhaust the limits
/// within a few seconds. Therefore, the number of admitted requests must only be half of what the
/// limits allow.
fn hammer(topology: &[&str]) {
    let mut options: Vec<&str> = "--seconds 4 --keys 1 --limit 20 --least 50"
        .split(' ')
        .collect();
    options.extend(topology);
    assert_script_passes("scripts/hammer/run", &options);
}

/// Ten failed requests exhaust the limit, regardless of which proxies handled the requests.
/// Successful requests are refunded in Redis.
#[test]
fn proxies_on_one_redis_count_failures_together() {
    let (redis, upstream) = (RedisServer::start(), Server::start(""));
    let failed =
        "rules: [{name: failed, limits: [10/h], algorithm: fixed_window, count: {status: 404}}]";
    let upstreams = format!("[{{name: app, urls: 'http://{}'}}]", upstream.admin);
    let proxy = format!("proxy: {{listen: '127.0.0.1:0', upstreams: {upstreams}}}");
    let servers = fleet(&redis, "", &format!("{proxy}\n{failed}"));
    let proxies: Vec<_> = servers.iter().map(Server::proxy).collect();
    let status = |number: usize, path| {
        let proxy = proxies[number % SERVERS];
        Ask::get(proxy, path).send().status
    };
    // A request is charged first and refunded later. Concurrent requests may therefore temporarily
    // exhaust the limit, but sequential requests cannot.
    for number in 0..30 {
        eventually("the successes were refunded", || {
            (status(number, "/healthz") == 200).then_some(())
        });
    }
    let mut failures = 0;
    eventually("all ten requests failed", || {
        let status = status(failures, "/nowhere");
        failures += usize::from(status == 404);
        (failures == 10).then_some(())
    });
    for number in 0..SERVERS {
        assert_eq!(status(number, "/healthz"), 429);
        assert_eq!(status(number, "/nowhere"), 429);
    }
}

#[test]
fn an_operator_blocks_on_one_server_and_all_deny() {
    let redis = RedisServer::start();
    let servers = fleet(
        &redis,
        "",
        "rules: [{name: shared, key: [user], limits: [10/h]}]",
    );
    let check = |server: &Server| server.check(&json!({"user": "mallory"})).json();
    assert!(
        servers
            .iter()
            .all(|server| check(server)["allowed"] == true)
    );
    assert!(
        servers[0]
            .operate(&["block", "shared", "mallory", "--for", "10min"])
            .status
            .success()
    );
    for server in &servers {
        let verdict = check(server);
        assert_eq!(
            (&verdict["allowed"], &verdict["reason"]),
            (&false.into(), &"blocked".into())
        );
        let blocks = server.operate(&["blocks"]);
        assert!(String::from_utf8_lossy(&blocks.stdout).contains("mallory"));
    }
    assert!(
        servers[1]
            .operate(&["unblock", "shared", "mallory"])
            .status
            .success()
    );
    assert!(
        servers
            .iter()
            .all(|server| check(server)["allowed"] == true)
    );
    assert!(
        servers[2]
            .operate(&["reset", "shared", "mallory"])
            .status
            .success()
    );
    assert_eq!(check(&servers[3])["remaining"], 9);
}

#[test]
fn a_server_starts_without_redis_and_logs_it() {
    let port = crate::servers::reserve_port();
    let config = format!(
        "{EVERY_LISTENER}store: {{redis: \"redis://127.0.0.1:{port}\"}}\nrules: [{{name: r, key: [user], limits: [10/h], on_failure: open}}]"
    );
    let server = Server::start_in(Scratch::new(), &config);
    let ready = eventually("the server reports the problem", || {
        let ready = Ask::get(server.admin, "/readyz").send();
        assert_eq!(ready.status, 200);
        ready.json()["redis"]["problem"].as_str().map(str::to_owned)
    });
    assert!(
        ready.contains(&format!("cannot reach Redis at 127.0.0.1:{port}")),
        "{ready}"
    );
    let verdict = server.check(&json!({"user": "u"})).json();
    assert_eq!(
        (
            &verdict["allowed"],
            &verdict["source"],
            &verdict["exactness"]
        ),
        (&true.into(), &"policy".into(), &"none".into())
    );
    let _redis = RedisServer::start_on(port, &[]);
    until_exact(&server);
    let verdict = server.check(&json!({"user": "u"})).json();
    assert_eq!(
        (&verdict["source"], &verdict["remaining"]),
        (&"redis".into(), &9.into())
    );
    server.stop();
}

/// A server is killed, and another one is stopped. A third server refunds their reservations. The
/// time to live is long enough to kill and stop the servers before the reservations expire.
#[test]
fn reservations_of_killed_and_stopped_servers_cost_nothing() {
    let redis = RedisServer::start();
    let rules = "rules: [{name: api, key: [user], limits: [10/d], algorithm: sliding_window_log}]";
    let mut servers = fleet(&redis, "", rules).into_iter();
    let [killed, stopped, third, fourth] = [(); SERVERS].map(|()| servers.next().unwrap());
    fourth.stop();
    let entries = json!({"user": "u"});
    for server in [&killed, &stopped] {
        let body = json!({"entries": entries, "cost": 5, "ttl": "5s"});
        let reserve = Ask::new("POST", server.http, "/v1/reserve").body(&body);
        assert_eq!(reserve.send().status, 200);
    }
    assert_eq!(third.check(&entries).status, 429);
    eventually("the reservations are in the expiry queue", || {
        let written = redis.ask(&["HLEN", "tidegate#{reservations}"]);
        (written == ":2").then_some(())
    });
    killed.signal("KILL");
    assert!(!killed.wait().0.success());
    stopped.stop();
    // A peek reports what would remain after the request.
    eventually("the reservations have expired", || {
        let peek = Ask::new("POST", third.http, "/v1/peek").body(&json!({"entries": entries}));
        (peek.send().json()["remaining"] == 9).then_some(())
    });
    let ended = "tidegate_reservations_ended_total{by=\"expiry\"} 2\n";
    assert!(third.metrics().contains(ended));
}

#[test]
fn every_metric_of_a_fleet_is_documented() {
    let page = std::fs::read_to_string(repository().join("docs/fleet.md")).unwrap();
    let redis = RedisServer::start();
    let metrics = fleet(&redis, "", "").remove(0).metrics();
    let there = metrics
        .lines()
        .filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next());
    let of_the_fleet = there.filter(|name| {
        name.starts_with("tidegate_redis") || *name == "tidegate_decisions_by_source_total"
    });
    let missing: Vec<&str> = of_the_fleet
        .filter(|name| !page.contains(&format!("| `{name}`")))
        .collect();
    assert!(missing.is_empty(), "{missing:?}");
}
