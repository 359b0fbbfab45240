//! Tests of `store: {redis: …}` in the rules file: valid settings, and every error with its line.

use tidegate_config::{Config, Password};
use tidegate_core::{FallbackShare, OnFailure, Span};
use tidegate_redis::{NodeShare, Topology};

use crate::mistakes;

#[test]
fn the_redis_store_in_full() {
    let text = "
store:
  redis: {sentinel: ['redis://s:pw@10.0.0.1:26379', 'redis://10.0.0.2:26379'], primary: tide}
  timeout: 40ms
  on_failure: closed
  fallback_share: 25%
  denial_cache_ttl: off
  connections: 4
  prefix: 'prod:limits'
  username: tidegate
  password_env: REDIS_PASSWORD
  tls: {ca: ca.pem, cert: client.pem, key: client.key}
  memory: {max_keys: 1000}
rules: [{name: r, limits: [1/s], on_failure: open}]
";
    let config = Config::parse(text).unwrap();
    let redis = config.redis.unwrap();
    let Topology::Sentinel { sentinels, primary } = &redis.topology else {
        panic!("{:?}", redis.topology);
    };
    let sentinels: Vec<String> = sentinels.iter().map(ToString::to_string).collect();
    assert_eq!(
        (sentinels, primary.as_str()),
        (
            vec!["10.0.0.1:26379".into(), "10.0.0.2:26379".into()],
            "tide"
        )
    );
    assert_eq!(redis.sentinel_login.password.as_deref(), Some("pw"));
    assert_eq!(
        (redis.username.as_deref(), &redis.password),
        (Some("tidegate"), &Password::Env("REDIS_PASSWORD".into()))
    );
    assert_eq!(
        (
            redis.timeout.as_millis(),
            redis.connections,
            redis.prefix.as_str()
        ),
        (40, 4, "prod:limits")
    );
    assert!(redis.ca.is_some() && redis.certificate.is_some());
    assert_eq!(redis.fallback.on_failure, OnFailure::Closed);
    assert_eq!(
        (redis.fallback.share, redis.fallback.denial_ttl),
        (
            NodeShare::Fixed(FallbackShare::percent(25).unwrap()),
            Span::ZERO
        )
    );
    assert_eq!(config.memory.max_keys, 1_000);
    let rule = config.rules.rule("r").unwrap();
    assert_eq!(rule.limits().on_failure(), Some(OnFailure::Open));
}

#[test]
fn a_login_in_the_file_overrides_the_url() {
    let config = Config::parse("store: {redis: 'rediss://me:secret@cache/3'}").unwrap();
    assert!(!format!("{config:?}").contains("secret"));
    let redis = config.redis.unwrap();
    assert_eq!(
        (redis.username.as_deref(), &redis.password),
        (Some("me"), &Password::Literal("secret".into()))
    );
    let config =
        Config::parse("store: {redis: 'redis://me:secret@cache', username: other, password: x}")
            .unwrap();
    let redis = config.redis.unwrap();
    assert_eq!(
        (redis.username.as_deref(), &redis.password),
        (Some("other"), &Password::Literal("x".into()))
    );
}

#[test]
fn mistakes_about_redis_are_reported() {
    let one_of = "expected a URL such as redis://127.0.0.1:6379, {cluster: [URL, …]} or {sentinel: [URL, …], primary: NAME}";
    let url = "the scheme is missing; expected a URL such as redis://127.0.0.1:6379, or rediss:// for TLS, with an optional user:password@ before the host";
    let cases = [
        ("store: {redis: localhost}", format!("store.redis (line 1): {url}")),
        ("store: {redis: {cluster: [nowhere]}}", format!("store.redis.cluster[0] (line 1): {url}")),
        ("store: {redis: {cluster: []}}", "store.redis.cluster (line 1): expected at least one URL".into()),
        ("store: {redis: {}}", format!("store.redis (line 1): {one_of}")),
        (
            "store: {redis: {sentinel: ['redis://a']}}",
            "store.redis.primary (line 1): is missing; set it to the primary's name in the Sentinel configuration".into(),
        ),
        (
            "store: {redis: {cluster: ['redis+unix:///run/redis.sock']}}",
            "store.redis.cluster[0] (line 1): a Unix socket is local to one machine; write the address of a server on the network".into(),
        ),
        ("store: {redis: 'redis://a', timeout: 6s}", "store.timeout (line 1): must be from 1ms to 5s, got 6s".into()),
        ("store: {redis: 'redis://a', fallback_share: 0%}", "store.fallback_share (line 1): must be auto or from 1% to 100%; use 100% divided by the number of servers".into()),
        ("store: {redis: 'redis://a', denial_cache_ttl: 2min}", "store.denial_cache_ttl (line 1): must be at most 1min, got 2min".into()),
        ("store: {redis: 'redis://a', connections: 0}", "store.connections (line 1): must be at least 1".into()),
        ("store: {redis: 'redis://a', connections: 65}", "store.connections (line 1): must be at most 64, got 65".into()),
        (
            "store: {redis: 'redis://a', prefix: 'a b'}",
            "store.prefix (line 1): expected 1 to 64 letters, digits, `-`, `_`, `.` or `:`, got (not shown: it could contain a secret)".into(),
        ),
        (
            "store: {redis: 'redis://a', password: x, password_env: Y}",
            "store.password (line 1): conflicts with `password_env`; remove one of the two".into(),
        ),
        (
            "store: {redis: 'redis://a', tls: {cert: c.pem}}",
            "store.tls.key (line 1): is missing; a certificate needs its key".into(),
        ),
        (
            "store: {redis: 'redis://a', memory: {snapshot: file}}",
            "store.memory (line 1): snapshots are not supported with the Redis store, which keeps the counts \
             itself; remove `snapshot`".into(),
        ),
        ("store: {memory: {}, fallback_share: 10%}", "store.fallback_share (line 1): applies only to the Redis store; remove it".into()),
        (
            "rules: [{name: r, limits: [1/s], on_failure: locl}]",
            "rules[0].on_failure (line 1): expected one of open, closed, local, got \"locl\"; did you mean `local`?".into(),
        ),
    ];
    for (text, expected) in cases {
        assert_eq!(mistakes(text), [expected], "{text}");
    }
}
