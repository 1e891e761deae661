//! Connections to peers: Hellos, their checks, and control messages that wait for a connection.

use super::Membership;
use crate::cx::Cx;
use crate::event::{Effect, PeerKey};
use crate::outcome::Outcome;
use lagoon_protocol::{
    ControlBody, Hello, PoolShape, Rejected, RelayMember, RelayMembers, VERSION_MAX, VERSION_MIN, version_refusal,
};
use lagoon_types::InstanceId;
use lagoon_types::limits;

impl Membership {
    pub(super) fn on_peer_up(cx: &mut Cx, peer: PeerKey) {
        if let Some(body) = hello(cx) {
            cx.peers.note_greeted(peer);
            cx.send(peer, body);
        } else {
            cx.peers.note_ungreeted(peer);
        }
    }

    /// Sends overdue Hellos.
    pub(super) fn greet(cx: &mut Cx) {
        if cx.standing.id.is_none() {
            return;
        }
        for peer in cx.peers.take_ungreeted() {
            Self::on_peer_up(cx, peer);
        }
    }

    /// Marks every peer for a new Hello, once this instance has an id again after a fence.
    pub(super) fn greet_again(cx: &mut Cx) {
        cx.peers.note_all_ungreeted();
    }

    /// Handles a peer's Hello. An older connection of the same instance, and an older instance on the same connection,
    /// are dropped first.
    pub(super) fn on_hello(cx: &mut Cx, peer: PeerKey, hello: Hello) {
        if let Err(reason) = check_hello(cx, &hello) {
            let rejected = Rejected { reason: reason.clone() };
            cx.effects.push(Effect::Control { peer, body: ControlBody::Rejected(rejected) });
            cx.effects.push(Effect::Close { peer, reason });
            return;
        }
        let instance = InstanceId(hello.instance);
        // The peer was fenced and has another id now.
        if cx.peers.known(peer).is_some_and(|known| known.instance != instance) {
            forget_peer(cx, peer);
        }
        if let Some(old) = cx.peers.key(instance).filter(|old| *old != peer) {
            forget_peer(cx, old);
        }
        cx.emit(Outcome::Introduced { peer, hello });
    }

    /// Records a peer whose Hello is valid as known.
    pub(super) fn on_introduced(cx: &mut Cx, peer: PeerKey, hello: Hello) {
        let instance = InstanceId(hello.instance);
        let relays = cx.config.can_relay() && !hello.host.is_empty();
        cx.memory.rm.debtor.set_beside(instance, relays.then(|| hello.host == cx.config.host));
        cx.peers.introduce(instance, peer, hello.host);
        let ended = cx.memory.rm.on_peer_hello(instance, hello.incarnation, cx.now_ms);
        cx.emit(Outcome::LeasesEnded(ended));
        let greeted = cx.peers.is_greeted(peer);
        for body in cx.peers.take_messages(instance) {
            cx.send(peer, body);
        }
        cx.emit(Outcome::PeerUp { peer, instance, greeted, lent: hello.lent.map(|lent| *lent) });
    }

    /// Connects to creditors beside this one, to which a debtor wants queries relayed.
    pub(super) fn on_relay_members(cx: &mut Cx, members: &RelayMembers) {
        for RelayMember { instance, quic_addr } in members.members.iter().take(limits::RELAY_CREDITORS_MAX) {
            let instance = InstanceId(*instance);
            if cx.standing.id != Some(instance) && cx.peers.key(instance).is_none() {
                cx.dial_as(false, instance, quic_addr, None);
            }
        }
    }

    pub(super) fn on_rtt(cx: &mut Cx, peer: PeerKey, rtt_us: u32) {
        cx.peers.note_rtt(peer, rtt_us);
    }

    pub(super) fn on_peer_down(cx: &mut Cx, peer: PeerKey) {
        cx.peers.forget_greetings(peer);
        forget_peer(cx, peer);
    }

    /// Handles a dropped frame to a peer whose connection is up: the peer stays known. Requests that depended on the
    /// frame end on both sides; control messages are repeated by their senders, a Hello with the next tick.
    pub(super) fn on_send_failed(cx: &mut Cx, peer: PeerKey) {
        cx.peers.note_ungreeted(peer);
        if let Some(known) = cx.peers.known(peer) {
            cx.emit(Outcome::SendFailed { peer, instance: known.instance });
        }
    }

    /// Stops dialling peers that did not connect in time, and drops their messages.
    pub(super) fn expire_dialling(cx: &mut Cx) {
        for instance in cx.peers.expire_dialling(cx.now_ms) {
            cx.memory.rm.debtor.on_peer_down(instance, cx.now_ms);
        }
    }
}

fn hello(cx: &Cx) -> Option<ControlBody> {
    let instance = cx.standing.id?;
    Some(ControlBody::Hello(Box::new(Hello {
        version_min: VERSION_MIN,
        version_max: VERSION_MAX,
        instance: instance.0,
        incarnation: cx.standing.incarnation,
        shape: Some(cx.config.pool_shape()),
        lent: cx.config.lent.clone().map(Box::new),
        host: cx.config.host.clone(),
    })))
}

fn check_hello(cx: &Cx, hello: &Hello) -> Result<(), String> {
    if let Some(refusal) = version_refusal((hello.version_min, hello.version_max), "the peer", "this instance") {
        return Err(refusal);
    }
    if hello.instance == 0 {
        return Err("0 is no instance's number".to_owned());
    }
    if cx.standing.id == Some(InstanceId(hello.instance)) {
        return Err(format!(
            "{} is this instance's own number\nhint: one of the two was numbered by another gManager; restart it",
            hello.instance
        ));
    }
    if hello.host.len() > limits::HOST_NAME_BYTES_MAX {
        return Err(format!(
            "the name of a host has {} bytes, at most {}",
            hello.host.len(),
            limits::HOST_NAME_BYTES_MAX
        ));
    }
    let ours = cx.config.pool_shape();
    match &hello.shape {
        Some(theirs) if *theirs == ours => Ok(()),
        Some(theirs) => Err(shape_difference(&ours, theirs)),
        None => Err("the peer sent no pool shape".to_owned()),
    }
}

fn forget_peer(cx: &mut Cx, peer: PeerKey) {
    let Some(instance) = cx.peers.forget(peer) else { return };
    cx.memory.rm.debtor.forget_beside(instance);
    cx.memory.rm.debtor.on_peer_down(instance, cx.now_ms);
    cx.emit(Outcome::PeerGone(instance));
}

/// Names the first field in which two pool shapes differ, with both values.
fn shape_difference(ours: &PoolShape, theirs: &PoolShape) -> String {
    let hex = |hash: &[u8]| hash.iter().take(8).map(|b| format!("{b:02x}")).collect::<String>();
    if ours.model_hash != theirs.model_hash {
        return format!(
            "the models differ: this instance serves {}, the peer {}",
            hex(&ours.model_hash),
            hex(&theirs.model_hash)
        );
    }
    let floats = [
        ("alibi_bias_max", ours.alibi_bias_max, theirs.alibi_bias_max),
        ("attention_softcap", ours.attention_softcap, theirs.attention_softcap),
        ("attention_scale", ours.attention_scale, theirs.attention_scale),
    ];
    if let Some((name, ours, theirs)) = floats.into_iter().find(|(_, ours, theirs)| ours != theirs) {
        let [ours, theirs] = [ours, theirs].map(f32::from_bits);
        return format!("{name} differs: this instance has {ours}, the peer {theirs}");
    }
    let fields = [
        ("layers", ours.layers, theirs.layers),
        ("heads", ours.heads, theirs.heads),
        ("kv_heads", ours.kv_heads, theirs.kv_heads),
        ("head_dim", ours.head_dim, theirs.head_dim),
        ("kv_dtype", ours.kv_dtype, theirs.kv_dtype),
        ("block_tokens", ours.block_tokens, theirs.block_tokens),
        ("window", ours.window, theirs.window),
        ("latent", ours.latent.into(), theirs.latent.into()),
    ];
    if let Some((name, ours, theirs)) = fields.into_iter().find(|(_, ours, theirs)| ours != theirs) {
        return format!("{name} differs: this instance has {ours}, the peer {theirs}");
    }
    let lists = [
        ("windows", &ours.windows, theirs.windows.as_slice()),
        ("unpooled_windows", &ours.unpooled_windows, &theirs.unpooled_windows),
    ];
    let differs = lists.into_iter().find(|(_, ours, theirs)| ours != theirs);
    differs.map_or_else(
        || "the pool shapes differ".to_owned(),
        |(name, ours, theirs)| {
            // The peer's list has not been checked.
            let theirs = &theirs[..theirs.len().min(limits::LAYERS_MAX as usize)];
            format!("{name} differs: this instance has {ours:?}, the peer {theirs:?}")
        },
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::batch::freeze::tests::{PEER, config};
    use crate::{Event, Instance, InstanceConfig, LayerWindows};

    /// What an instance with windows by layer replies to a peer whose config.json differs by `change`.
    fn rejected(change: impl FnOnce(&mut InstanceConfig, &mut Hello)) -> String {
        let mut ours = config();
        (ours.kv.layers, ours.layer_windows.pooled) = (3, vec![128, 0, 128]);
        let (mut theirs, mut hello) = (ours.clone(), Hello { instance: 2, incarnation: 5, ..Hello::default() });
        (hello.version_min, hello.version_max) = (VERSION_MIN, VERSION_MAX);
        change(&mut theirs, &mut hello);
        hello.shape = Some(theirs.pool_shape());
        let mut instance = Instance::new(ours).unwrap();
        instance.handle(Event::PeerUp { peer: PEER }, 1_000);
        let effects = instance.handle(Event::Control { peer: PEER, body: ControlBody::Hello(Box::new(hello)) }, 1_000);
        let reason = effects.into_iter().find_map(|effect| match effect {
            Effect::Control { body: ControlBody::Rejected(rejected), .. } => Some(rejected.reason),
            _ => None,
        });
        reason.unwrap_or_default()
    }

    #[test]
    fn a_peer_whose_attention_differs_is_refused_by_the_field() {
        assert_eq!(rejected(|_, _| {}), "");
        // Another query_pre_attn_scalar.
        let reason = rejected(|config, _| config.attention_scale = 0.25);
        assert_eq!(reason, "attention_scale differs: this instance has 1, the peer 0.25");
        let reason = rejected(|config, _| config.layer_windows.pooled = vec![0, 128, 128]);
        assert_eq!(reason, "windows differs: this instance has [128, 0, 128], the peer [0, 128, 128]");
        let reason = rejected(|config, _| {
            config.layer_windows = LayerWindows { unpooled: vec![64], ..config.layer_windows.clone() };
        });
        assert_eq!(reason, "unpooled_windows differs: this instance has [], the peer [64]");
    }

    #[test]
    fn an_older_peer_is_refused_by_its_version() {
        let reason = rejected(|_, hello| (hello.version_min, hello.version_max) = (1, 1));
        let expected =
            "the peer speaks protocol version 1, this instance version 3: no common version, the peer is older";
        assert!(reason.starts_with(expected) && reason.contains("hint: upgrade"), "{reason}");
    }
}
