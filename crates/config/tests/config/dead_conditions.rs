//! Tests of the warnings about conditions that no request can meet and about entries that no
//! listener provides.

use crate::{PROXY, warnings};

/// Returns the warnings for a file that consists of the sections in `head` and one rule with these
/// `fields`. The rule is on line 2.
fn of_rule(head: &str, fields: &str) -> Vec<String> {
    let rules = format!("rules:\n  - {{name: a, {fields}, limits: [9/s]}}\n");
    let messages = warnings(&format!("{rules}{head}"));
    let place = |messages: &str| messages.strip_prefix("rules[0].").map(str::to_owned);
    messages
        .iter()
        .map(|messages| place(messages).unwrap())
        .collect()
}

#[test]
fn impossible_texts_are_warnings_with_the_normal_form() {
    for (fields, at, advice) in [
        (
            "when: {path: login}",
            "when.path",
            "paths begin with a slash and are normalised; write /login",
        ),
        (
            "when: {path: [{route: /a}, //b]}",
            "when.path[1]",
            "paths begin with a slash and are normalised; write /b",
        ),
        (
            "when: {path: /%6Cogin/**}",
            "when.path",
            "paths begin with a slash and are normalised; write /login/**",
        ),
        (
            "when: {path: /a/../b}",
            "when.path",
            "paths with the segments `.` and `..` are rejected; write the intended path",
        ),
        (
            "when: {method: {not: get}}",
            "when.method.not",
            "methods are uppercase; write GET",
        ),
        (
            "when: {host: 'API.example:8080'}",
            "when.host",
            "hosts are lowercase and have no port; write api.example",
        ),
        (
            "when: {country: de}",
            "when.country",
            "country codes are uppercase; write DE",
        ),
        (
            "allow: {ip: 10.0.0.0/8}",
            "allow.ip",
            "an address never equals a network; write {cidr: 10.0.0.0/8}",
        ),
        (
            "elastic: {extra: 10%, when: {path: {is: b}}}",
            "elastic.when.path.is",
            "paths begin with a slash and are normalised; write /b",
        ),
    ] {
        let expected =
            format!("{at} (line 2): no-match: at the proxy and in forward-auth, {advice}");
        assert_eq!(of_rule("", fields), [expected], "{fields}");
    }
    let query = "when.path (line 2): no-match: a path never contains the query; to match the path alone, write \
        {route: /search}; to match a parameter of the query, use the entry `query.NAME`";
    assert_eq!(of_rule("", "when: {path: '/search?q=*'}"), [query]);
    let routed = PROXY.replace("name: app,", "name: app, when: {path: app/**},");
    assert!(warnings(&routed)[0].starts_with("proxy.upstreams[0].when.path (line 1): no-match:"));
}

#[test]
fn a_misspelt_method_is_a_warning() {
    for (written, meant) in [
        ("GTE", "GET"),
        ("GETT", "GET"),
        ("PSOT", "POST"),
        ("POSR", "POST"),
        ("POTS", "POST"),
        ("DELTE", "DELETE"),
        ("DELT", "DELETE"),
        ("DELEET", "DELETE"),
        ("DLETE", "DELETE"),
        ("OPTION", "OPTIONS"),
        ("OPITONS", "OPTIONS"),
        ("PACTH", "PATCH"),
    ] {
        let expected = format!(
            "when.method (line 2): unknown-method: {written} is not a standard method; did you mean `{meant}`?"
        );
        for when in ["{method: METHOD}", "{method: [GET, METHOD, PURGE]}"] {
            let messages = of_rule("", &format!("when: {}", when.replace("METHOD", written)));
            assert_eq!(messages.len(), 1, "{messages:?}");
            assert_eq!(messages[0].replace("method[1]", "method"), expected);
        }
    }
    let expected = "when.method (line 2): no-match: at the proxy and in forward-auth, methods are uppercase; write GET";
    for written in ["get", "Get", "gte"] {
        assert_eq!(
            of_rule("", &format!("when: {{method: {written}}}")),
            [expected]
        );
    }
}

/// The methods of the IANA registry, and methods that well-known software uses.
#[test]
fn a_method_of_another_protocol_is_not_a_misspelling() {
    let methods = "ACL BASELINE-CONTROL BIND CHECKIN CHECKOUT CONNECT COPY DELETE GET HEAD LABEL LINK LOCK MERGE \
        MKACTIVITY MKCALENDAR MKCOL MKREDIRECTREF MKWORKSPACE MOVE OPTIONS ORDERPATCH PATCH POST PRI PROPFIND \
        PROPPATCH PUT QUERY REBIND REPORT SEARCH TRACE UNBIND UNCHECKOUT UNLINK UNLOCK UPDATE UPDATEREDIRECTREF \
        VERSION-CONTROL PURGE BAN REFRESH LIST SET SUBSCRIBE UNSUBSCRIBE NOTIFY M-SEARCH SOURCE TRACK DEBUG PUSH COLLECT POLL READ \
        WATCH BATCH BDELETE '*' 'G*' '*ET' 'GET*' 'POS*' 'P*ST' 'OPTION*'";
    for method in methods.split_whitespace() {
        let messages = of_rule("", &format!("when: {{method: {method}}}"));
        assert!(messages.is_empty(), "{messages:?}");
    }
    assert_eq!(of_rule("", "when: {method: {regex: 'GTE|PSOT'}}"), [""; 0]);
}

#[test]
fn possible_texts_are_not_warnings() {
    for fields in [
        "when: {path: {is: /login}, method: [GET, PURGE], host: '*.example.com'}",
        "when: {path: ['*.php', /api/**, '/a*b', {regex: 'x'}]}",
        // The proxy does not change the letter case of paths, and some services have paths with
        // upper-case letters.
        "when: {path: [/API/**, /Account/Login/**]}",
        "when: {ip: {cidr: 10.0.0.0/8}, country: {not: DE}, host: '[::1]'}",
        "when: {time: '01:00-02:00', days: mon, zone: Europe/Berlin}",
        "key: [ip, 'customer'], cost: weight, when: {anything: login}",
    ] {
        assert_eq!(of_rule("", fields), [""; 0], "{fields}");
    }
}

#[test]
fn with_the_proxy_alone_only_its_entries_exist() {
    let shut = format!("{PROXY}listen: {{http: off, resp: off}}\n");
    for (fields, at, advice) in [
        (
            "key: [customer]",
            "key[0]",
            "expected one of method, path, host, ip, ip.exact, tenant, header.NAME, cookie.NAME, query.NAME",
        ),
        ("when: {tme: '01:00-02:00'}", "when.tme", "expected one of"),
        ("when: {pth: /login}", "when.pth", "did you mean `path`?"),
        (
            "when: {status: {not: 401}}",
            "when.status",
            "expected one of",
        ),
        ("cost: weight", "cost", "expected one of"),
        (
            "when: {tls.client: bob}",
            "when.tls.client",
            "expected one of",
        ),
        ("when: {country: DE}", "when.country", "expected one of"),
        ("when: {zone: {is: eu}}", "when.zone", "expected one of"),
    ] {
        let entries = "entries: {tenant: {of: host, split: '.'}}\n";
        let messages = of_rule(&format!("{shut}{entries}"), fields);
        let begins = format!("{at} (line 2): no-entry: no request at the proxy has an entry \"");
        assert_eq!(messages.len(), 1, "{fields}: {messages:?}");
        assert!(
            messages[0].starts_with(&begins) && messages[0].contains(advice),
            "{messages:?}"
        );
        // Callers of other listeners can send any entry, but the name `pth` is probably a typo.
        let messages = of_rule(PROXY, fields);
        assert_eq!(
            messages.len(),
            usize::from(fields.contains("pth")),
            "{messages:?}"
        );
    }
    let fields = "key: [ip, tenant, asn], cost: header.weight, when: {query.a: x, cookie.b: y, time: '01:00-02:00'}";
    let more = "entries: {tenant: {of: host, split: '.'}}\ngeoip: {asn: /x.mmdb}\n";
    assert_eq!(of_rule(&format!("{shut}{more}"), fields), [""; 0]);
}

#[test]
fn an_entry_that_differs_only_in_case_is_a_warning() {
    for (fields, at, written, meant) in [
        ("key: [IP]", "key[0]", "IP", "ip"),
        ("when: {Path: /login}", "when.Path", "Path", "path"),
        ("key: [Ip.Exact]", "key[0]", "Ip.Exact", "ip.exact"),
        ("when: {ASN: '64496'}", "when.ASN", "ASN", "asn"),
    ] {
        let expected = format!(
            "{at} (line 2): no-entry: entry names are case-sensitive, and no listener provides an entry \"{written}\"; write `{meant}`"
        );
        for head in ["", &format!("{PROXY}listen: {{http: off, resp: off}}\n")] {
            assert_eq!(of_rule(head, fields).join("\n"), expected, "{fields}");
        }
    }
}

#[test]
fn the_number_of_warnings_is_bounded() {
    let rule = |at: usize| format!("  - {{name: r{at}, when: {{path: x}}, limits: [1/s]}}\n");
    let rules: String = (0..50).map(rule).collect();
    assert_eq!(warnings(&format!("rules:\n{rules}")).len(), 20);
}

#[test]
fn a_regular_expression_compared_as_text_is_a_warning() {
    for (when, written) in [
        ("{path: '^/api/.*$'}", "^/api/.*$"),
        ("{path: '/v[0-9]+/x'}", "/v[0-9]+/x"),
        ("{header.user-agent: '^curl'}", "^curl"),
    ] {
        let messages = of_rule("", &format!("when: {when}"));
        let expected = format!("if it is a regular expression, write {{regex: \"{written}\"}}");
        assert!(
            messages.len() == 1 && messages[0].ends_with(&expected),
            "{messages:?}"
        );
    }
    for sound in [
        "{path: '/static/*.*'}",
        "{path: {is: '/a$b'}}",
        "{header.x: 'a+$'}",
    ] {
        assert!(of_rule("", &format!("when: {sound}")).is_empty(), "{sound}");
    }
}

#[test]
fn a_key_entry_that_probably_never_arrives_is_a_warning() {
    let rules = |keys: &[&str]| {
        let rules = keys.iter().enumerate();
        let rules =
            rules.map(|(at, key)| format!("  - {{name: r{at}, key: [{key}], limits: [1/s]}}\n"));
        let rules = rules.chain(["  - {name: behind, limits: [9/s]}\n".to_owned()]);
        warnings(&format!("rules:\n{}", rules.collect::<String>()))
    };
    let messages = rules(&["customer", "custmer", "customer"]);
    let expected = "rules[1].key[0] (line 3): no-entry: no listener derives an entry \"custmer\" from requests, \
        so this rule applies only if a caller sends it; did you mean `customer`?";
    assert_eq!(messages, [expected]);
    for (key, meant) in [
        ("headers.x-key", "header.x-key"),
        ("contry", "country"),
        ("mehtod", "method"),
        ("ipp", "ip"),
        ("iip", "ip"),
        ("assn", "asn"),
    ] {
        let messages = rules(&[key]);
        assert!(
            messages.len() == 1 && messages[0].ends_with(&format!("did you mean `{meant}`?")),
            "{messages:?}"
        );
    }
    for keys in [
        &["user", "tenant"][..],
        &["key_a", "key_b"],
        &["ip", "id"],
        &["country", "asn"],
        &["zip", "vip", "api", "ips", "asan", "app"],
    ] {
        assert!(rules(keys).is_empty(), "{keys:?}");
    }
}

#[test]
fn a_misspelt_entry_of_a_condition_is_a_warning() {
    for (fields, at, written, meant) in [
        ("when: {methd: POST}", "when.methd", "methd", "method"),
        ("when: {pth: /login}", "when.pth", "pth", "path"),
        ("when: {paths: /login}", "when.paths", "paths", "path"),
        ("when: {hsot: a.example}", "when.hsot", "hsot", "host"),
        ("when: {mthd: POST}", "when.mthd", "mthd", "method"),
        ("when: {mathod: POST}", "when.mathod", "mathod", "method"),
        (
            "allow: {ip_exact: '::1'}",
            "allow.ip_exact",
            "ip_exact",
            "ip.exact",
        ),
        (
            "when: {contry: {not: DE}}",
            "when.contry",
            "contry",
            "country",
        ),
        (
            "when: {headers.x-key: a}",
            "when.headers.x-key",
            "headers.x-key",
            "header.x-key",
        ),
        ("when: {tennant: a}", "when.tennant", "tennant", "tenant"),
        (
            "key: [customer], when: {custmer: {present: true}}",
            "when.custmer",
            "custmer",
            "customer",
        ),
    ] {
        let expected = format!(
            "{at} (line 2): no-entry: no listener derives an entry \"{written}\" from requests, so a request has it \
             only if a caller sends it; did you mean `{meant}`?"
        );
        let entries = "entries: {tenant: {of: host, split: '.'}}\n";
        assert_eq!(of_rule(entries, fields), [expected], "{fields}");
    }
    let block =
        "rules:\n  - name: a\n    limits: [9/s]\n    when:\n      pth:\n        route: /login\n";
    let messages = warnings(block);
    assert!(
        messages.len() == 1 && messages[0].starts_with("rules[0].when.pth (line 5): no-entry"),
        "{messages:?}"
    );
}

#[test]
fn a_header_and_a_name_of_other_software_are_misspelt_entries() {
    let shut = format!("{PROXY}listen: {{http: off, resp: off}}\n");
    for (entry, meant) in [
        ("X-Customer", "header.x-customer"),
        ("x-customer", "header.x-customer"),
        ("User-Agent", "header.user-agent"),
        ("authorization", "header.authorization"),
        ("Header.X-Customer", "header.x-customer"),
        ("HEADER.x-key", "header.x-key"),
        ("Headers.X-Key", "header.x-key"),
        ("Cookie.Session", "cookie.Session"),
        ("client_ip", "ip"),
        ("remote_addr", "ip"),
        ("$remote_addr", "ip"),
        ("Remote-Addr", "ip"),
        ("X-Forwarded-For", "ip"),
        ("request_uri", "path"),
    ] {
        let meant = format!("; did you mean `{meant}`?");
        for fields in [
            format!("key: ['{entry}']"),
            format!("cost: '{entry}'"),
            format!("when: {{'{entry}': a}}"),
            format!("allow: {{'{entry}': a}}"),
        ] {
            // If the proxy is the only listener, only the entries that it derives exist. With any
            // other listener, clients can send any entry.
            for head in ["", PROXY, &shut] {
                let messages = of_rule(head, &fields);
                assert_eq!(messages.len(), 1, "{fields}: {messages:?}");
                assert!(messages[0].contains("no-entry: "), "{messages:?}");
                assert!(messages[0].ends_with(&meant), "{messages:?}");
            }
        }
    }
    let entries =
        "entries: {client_ip: {of: header.x-a, split: '.'}, X-Team: {of: host, split: '.'}}\n";
    let silent = "when: {header.X-Customer: a, client_ip: a, X-Team: b}";
    assert_eq!(of_rule(entries, silent), [""; 0]);
}

#[test]
fn a_name_in_another_letter_case_is_a_misspelt_entry() {
    let rules = "rules:\n  - {name: a, key: [customer], limits: [1/s]}\n  - {name: b, key: [Customer], \
        limits: [1/s]}\n";
    let expected = "rules[1].key[0] (line 3): no-entry: no listener derives an entry \"Customer\" from requests, \
        so this rule applies only if a caller sends it; did you mean `customer`?";
    assert_eq!(warnings(rules), [expected]);
    let entries = "entries: {tenant: {of: host, split: '.'}}\n";
    let shut = format!("{PROXY}listen: {{http: off, resp: off}}\n{entries}");
    for head in [entries, &shut] {
        let messages = of_rule(head, "key: [TENANT]");
        assert_eq!(messages.len(), 1, "{messages:?}");
        assert!(
            messages[0].ends_with("; did you mean `tenant`?"),
            "{messages:?}"
        );
    }
}

#[test]
fn an_entry_of_an_application_is_not_a_misspelling() {
    for fields in [
        "when: {plan: free, id: a, user: b, cost: '1', post: c, zip: d}",
        "when: {county: a, schema: b, patch: c, ghost: d}",
        "when: {counter: a, team: b, hash: c, math: d, asin: e, vip: f}",
        "when: {header.x-key: a, header.x-keys: b}",
        "elastic: {extra: 10%, when: {hosts: 'yes'}}",
        "key: [methods, mthod, pats]",
        "when: {count: a, chem: b, header_size: c, user: d, users: e, regions: f, region: g}",
    ] {
        let entries = "entries: {methods: {of: host, split: '.'}, mthod: {of: host, split: '.'}, \
            pats: {of: host, split: '.'}}\n";
        assert_eq!(of_rule(entries, fields), [""; 0], "{fields}");
    }
}

/// Regression test: the time for comparing two long names must not be proportional to the product
/// of their lengths, as it would be with their edit distance.
#[test]
fn long_names_are_compared_in_linear_time() {
    let name = |at: usize| format!("{at:0>250}");
    let rule = |at: usize| {
        let name = name(at);
        format!("  - {{name: r{at}, key: [{name}], limits: [1/s]}}\n")
    };
    let rules: String = (100_000..100_999).map(rule).collect();
    warnings(&format!("rules:\n{rules}"));
}

/// Regression test: a name must not be compared with every use of every other name.
#[test]
fn a_file_with_many_names_is_read_in_linear_time() {
    let rule = |at: usize| {
        let key = if at.is_multiple_of(2) {
            "customer".to_owned()
        } else {
            format!("entry{at}")
        };
        format!("  - {{name: r{at}, when: {{plan: p{at}}}, key: [{key}], limits: [1/s]}}\n")
    };
    let rules: String = (0..20_000).map(rule).collect();
    assert_eq!(warnings(&format!("rules:\n{rules}")), [""; 0]);
}

#[test]
fn a_url_in_place_of_a_path_or_a_host_has_one_warning() {
    let url = "no-match: a path never contains a scheme and a host; write";
    let of_host = ", and match the host with the entry `host`";
    let fragment = "no-match: a path never contains a fragment (`#` and what follows), because clients do not send \
        it to a server; write";
    let at_proxy = "no-match: at the proxy and in forward-auth,";
    let host = format!("{at_proxy} a host has no scheme, no path and no user name; write");
    for (fields, expected) in [
        (
            "when: {path: 'https://example.com/login'}",
            format!("when.path (line 2): {url} {{route: /login}}{of_host}"),
        ),
        (
            "key: [ip], when: {path: 'https://example.com:8443/a//%62?x=1#top'}",
            format!("when.path (line 2): {url} {{route: /a/b}}{of_host}"),
        ),
        (
            "when: {path: {is: 'http://example.com/login'}}",
            format!("when.path.is (line 2): {url} {{is: /login}}{of_host}"),
        ),
        (
            "when: {path: {not: 'https://example.com'}}",
            format!("when.path.not (line 2): {url} /{of_host}"),
        ),
        (
            "when: {path: '#top'}",
            format!("when.path (line 2): {fragment} the path of the page"),
        ),
        (
            "key: [ip], when: {path: '/docs#top'}",
            format!("when.path (line 2): {fragment} {{route: /docs}}"),
        ),
        (
            "key: [ip], when: {path: /%6Cogin}",
            format!(
                "when.path (line 2): {at_proxy} paths begin with a slash and are normalised; write /login"
            ),
        ),
        (
            "when: {host: 'https://Example.com'}",
            format!("when.host (line 2): {host} example.com"),
        ),
        (
            "when: {host: 'https://*.example.com:8443/login?x'}",
            format!("when.host (line 2): {host} *.example.com"),
        ),
        (
            "when: {host: example.com/login}",
            format!("when.host (line 2): {host} example.com"),
        ),
        (
            "when: {host: /login}",
            format!("when.host (line 2): {host} only the name, such as example.com"),
        ),
    ] {
        assert_eq!(of_rule("", fields), [expected], "{fields}");
    }
}
