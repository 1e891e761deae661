//! Which request goes on, by route, key, address and rate.

use super::*;
use std::net::{IpAddr, Ipv4Addr};

const HERE: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);
const THERE: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 0, 0, 9));

fn listed(text: &str) -> Keys {
    let listed = parse(Path::new("keys.toml"), text).unwrap();
    Keys { fixed: Vec::new(), file: Some("keys.toml".into()), listed: RwLock::new(Arc::new(listed)) }
}

/// The status of a request; 0 is that it goes on.
fn ask(keys: &Keys, path: &str, key: Option<&str>, addr: IpAddr) -> u16 {
    ask_with(keys, path, key, addr, &[], false)
}

fn ask_with(keys: &Keys, path: &str, key: Option<&str>, addr: IpAddr, more: &[&'static str], of_pool: bool) -> u16 {
    let mut headers = HeaderMap::from_iter([(header::HOST, HeaderValue::from_static("localhost:8000"))]);
    if let Some(key) = key {
        headers.insert(header::AUTHORIZATION, HeaderValue::from_str(&format!("Bearer {key}")).unwrap());
    }
    more.iter().for_each(|name| drop(headers.insert(*name, HeaderValue::from_static("10.1.1.1"))));
    let client = Client { headers: &headers, addr: Some(ClientAddr(addr)), authority: None, of_pool };
    let Some(scope) = scope_of(path) else { return 0 };
    keys.admit(scope, &client).map_or_else(|error| error.status.as_u16(), |_| 0)
}

#[test]
fn without_keys_inference_is_open_and_administration_is_for_this_machine() {
    let keys = Keys::none();
    for path in ["/v1/completions", "/tokenize", "/nowhere", "/health"] {
        assert_eq!(ask(&keys, path, None, THERE), 0, "{path}");
    }
    for path in ["/lagoon/admin", "/lagoon/status", "/metrics", "/lagoon"] {
        assert_eq!([ask(&keys, path, None, HERE), ask(&keys, path, None, THERE)], [0, 403], "{path}");
        assert_eq!(ask(&keys, path, Some("guess"), THERE), 403);
        // A proxy on this machine passes on what comes from anywhere.
        for header in ["x-forwarded-for", "forwarded", "via"] {
            assert_eq!(ask_with(&keys, path, None, HERE, &[header], false), 403, "{path} {header}");
        }
    }
}

/// nginx, HAProxy, stunnel and `ssh -R` add no header that is looked for, and a browser sends the name that led it here.
#[test]
fn administration_without_a_key_is_for_requests_that_name_this_machine() {
    let keys = Keys::none();
    let ask = |hosts: &[&'static str], authority| {
        let mut headers = HeaderMap::new();
        for host in hosts {
            headers.append(header::HOST, HeaderValue::from_static(host));
        }
        let client = Client { headers: &headers, addr: Some(ClientAddr(HERE)), authority, of_pool: false };
        keys.admit(Scope::Admin, &client).is_ok()
    };
    for host in
        ["localhost", "LocalHost:8000", "127.0.0.1", "127.9.9.9:80", "[::1]", "[::1]:8000", "[::ffff:127.0.0.1]"]
    {
        assert!(ask(&[host], None), "{host}");
        assert!(!ask(&[host, "rebound.example"], None) && !ask(&[host], Some("rebound.example")), "{host}");
        assert!(ask(&[], Some(host)), "{host}");
    }
    for host in
        ["rebound.example", "localhost.rebound.example", "10.0.0.9:8000", "0.0.0.0", "[::]", "", "127.0.0.1.nip.io"]
    {
        assert!(!ask(&[host], None), "{host}");
    }
    assert!(!ask(&[], None));
}

/// A page that was open in a browser on this machine could drain the pool with a form.
#[test]
fn pages_of_other_hosts_do_not_administer_through_a_browser_here() {
    let keys = Keys::none();
    let ask = |path, origins: &[&'static str]| {
        let mut headers = HeaderMap::from_iter([(header::HOST, HeaderValue::from_static("localhost:8000"))]);
        for origin in origins {
            headers.append(header::ORIGIN, HeaderValue::from_static(origin));
        }
        let client = Client { headers: &headers, addr: Some(ClientAddr(HERE)), authority: None, of_pool: false };
        keys.admit(scope_of(path).unwrap(), &client).is_ok()
    };
    for origin in ["http://localhost:3000", "https://127.0.0.1", "http://[::1]:8000"] {
        assert!(ask("/lagoon/admin", &[origin]), "{origin}");
        assert!(!ask("/lagoon/admin", &[origin, "https://elsewhere.example"]), "{origin}");
    }
    for origin in
        ["https://elsewhere.example", "http://localhost.elsewhere.example", "null", "", "file://", "localhost"]
    {
        assert!(!ask("/lagoon/admin", &[origin]), "{origin}");
        assert!(ask("/v1/models", &[origin]), "{origin}");
    }
}

/// Every tenant of a file administered from this machine before.
#[test]
fn with_a_key_file_administration_takes_a_key_of_its_scope() {
    let keys = listed("[[key]]\nname = 'tenant'\nkey = 'a'\n");
    assert_eq!([ask(&keys, "/lagoon/admin", Some("a"), HERE), ask(&keys, "/lagoon/admin", None, HERE)], [403; 2]);
    assert_eq!(ask(&listed(""), "/metrics", None, HERE), 403);
}

#[test]
fn the_key_for_inference_administers_from_this_machine_only() {
    let keys = Keys::single("sesame");
    assert_eq!([ask(&keys, "/v1/models", None, HERE), ask(&keys, "/v1/models", Some("sesame"), THERE)], [401, 0]);
    assert_eq!(ask(&keys, "/health", None, THERE), 0);
    let admin = |key, addr| ask(&keys, "/lagoon/admin", key, addr);
    assert_eq!([admin(None, HERE), admin(Some("sesame"), HERE), admin(Some("sesame"), THERE)], [401, 0, 403]);
}

#[test]
fn the_key_for_administration_is_for_that_alone() {
    let keys = Keys::new(Some("sesame"), Some("root"), None).unwrap();
    for addr in [HERE, THERE] {
        let ask = |path, key| ask(&keys, path, Some(key), addr);
        assert_eq!([ask("/lagoon/admin", "root"), ask("/metrics", "root")], [0, 0]);
        assert_eq!([ask("/lagoon/admin", "sesame"), ask("/metrics", "sesame")], [403, 403]);
        assert_eq!([ask("/v1/models", "sesame"), ask("/v1/models", "root"), ask("/v1/models", "x")], [0, 403, 401]);
    }
    let keys = Keys::new(None, Some("root"), None).unwrap();
    assert_eq!([ask(&keys, "/v1/models", None, THERE), ask(&keys, "/lagoon/status", None, HERE)], [0, 401]);
}

/// The gateway has checked the key, and never administers.
#[test]
fn a_certificate_of_the_pool_is_good_for_inference() {
    let keys = Keys::new(Some("sesame"), Some("root"), None).unwrap();
    assert_eq!(ask_with(&keys, "/v1/models", None, THERE, &[], true), 0);
    assert_eq!(ask_with(&keys, "/lagoon/status", None, THERE, &[], true), 401);
    assert_eq!(ask_with(&Keys::none(), "/lagoon/status", None, THERE, &[], true), 403);
}

#[test]
fn a_file_lists_keys_with_scopes_and_rates() {
    // sha256sum of "b".
    let keys = listed(
        "[[key]]\nname = 'team-a'\nkey = 'a'\nrequests_per_minute = 2\n\
         [[key]]\nname = 'ops'\nsha256 = '3e23e8160039594a33894f6564e1b1348bbd7a0088d42c4acb73eeaed59c009d'\n\
         scopes = ['admin', 'inference']\n",
    );
    let of_a = |path| ask(&keys, path, Some("a"), THERE);
    assert_eq!([of_a("/v1/models"), of_a("/lagoon/status"), of_a("/v1/models"), of_a("/v1/models")], [0, 403, 0, 429]);
    let of_b = |path| ask(&keys, path, Some("b"), THERE);
    assert_eq!([of_b("/v1/models"), of_b("/lagoon/status"), of_b("/metrics")], [0, 0, 0]);
    assert_eq!([ask(&keys, "/v1/models", None, HERE), ask(&keys, "/v1/models", Some("c"), HERE)], [401, 401]);
    // An empty file opens nothing.
    assert_eq!(ask(&listed(""), "/v1/models", None, HERE), 401);
    let shown = format!("{keys:?}");
    assert!(!shown.contains("3e23") && !shown.contains("'a'"), "{shown}");
}

#[test]
fn tokens_count_against_a_key() {
    let keys = listed("[[key]]\nname = 'a'\nkey = 'a'\ntokens_per_minute = 60\n");
    let headers = HeaderMap::from_iter([(header::AUTHORIZATION, HeaderValue::from_static("Bearer a"))]);
    let client = Client { headers: &headers, addr: None, authority: None, of_pool: false };
    keys.admit(Scope::Inference, &client).unwrap().charge(600);
    let over = keys.admit(Scope::Inference, &client).unwrap_err();
    assert_eq!((over.status.as_u16(), over.code), (429, Some("rate_limit_exceeded")));
    assert!(over.retry_after_s.is_some_and(|seconds| (530..=541).contains(&seconds)), "{over:?}");
}

#[test]
fn files_that_are_wrong_are_refused_without_their_keys() {
    let cases = [
        ("[[key]]\nname = 'a'\nkey = 5550123\n", "line 3"),
        ("[[key]]\nname = 'a'\nkeys = '5550123'\n", "line 3"),
        ("[[key]]\nname = 'a'\nkey = '5550123\n", "line 3"),
        ("[[key]]\nname = 'a'\nkey = '5550123'\nscopes = ['root']\n", "line 4"),
        ("[[key]]\nname = 'a'\n", "needs one of"),
        ("[[key]]\nname = 'a'\nkey = '5550123'\nsha256 = '00'\n", "needs one of"),
        ("[[key]]\nname = 'a'\nsha256 = '5550123'\n", "64 hexadecimal"),
        ("[[key]]\nname = 'a'\nkey = '5550123'\nscopes = []\n", "good for nothing"),
        ("[[key]]\nname = 'a'\nkey = '5550123'\nrequests_per_minute = 0\n", "good for nothing"),
        ("[[key]]\nname = 'a'\nkey = '1'\n[[key]]\nname = 'a'\nkey = '5550123'\n", "twice"),
    ];
    for (text, word) in cases {
        let Err(error) = parse(Path::new("keys.toml"), text) else { panic!("{text}") };
        let output = format!("{error} {error:?}");
        assert!(
            output.contains(word) && output.contains("keys.toml") && !output.contains("5550123"),
            "{text}: {output}"
        );
    }
}

#[test]
fn a_file_that_is_read_again_keeps_what_was_used() {
    let path = std::env::temp_dir().join(format!("lagoon-keys-test-{}", std::process::id()));
    let entry =
        |name: &str, rate: u32| format!("[[key]]\nname = '{name}'\nkey = '{name}'\nrequests_per_minute = {rate}\n");
    std::fs::write(&path, entry("a", 1)).unwrap();
    let keys = Keys::new(None, None, Some(path.clone())).unwrap();
    let of = |name| ask(&keys, "/v1/models", Some(name), THERE);
    assert_eq!([of("a"), of("a"), of("b")], [0, 429, 401]);
    std::fs::write(&path, entry("a", 1) + &entry("b", 1)).unwrap();
    keys.reload();
    assert_eq!([of("a"), of("b"), of("b")], [429, 0, 429]);
    // What is not understood changes nothing.
    std::fs::write(&path, "[[key]").unwrap();
    keys.reload();
    assert_eq!(of("b"), 429);
    // A key that is taken out ends; a new limit begins anew.
    std::fs::write(&path, entry("a", 2)).unwrap();
    keys.reload();
    assert_eq!([of("a"), of("a"), of("a"), of("b")], [0, 0, 429, 401]);
    std::fs::remove_file(&path).unwrap();
    keys.reload();
    assert_eq!(of("b"), 401);
}
