//! Deliberate bugs: see [`lagoon_types::mutants`].

lagoon_types::mutants! {
    /// A creditor grants blocks of an existing lease again.
    DoubleGrant,
    /// A debtor treats a release as confirmed when it sends it.
    ReleaseUnconfirmed,
    /// A creditor serves its debtors without checking lease and epoch.
    EpochUnchecked,
    /// A debtor frees a moving block when its copy is verified, before its block table points to the copy.
    FreedBeforeSwitched,
    /// A creditor leases blocks as cached ones without looking for their block hashes.
    CachedUnverified,
    /// A creditor leases cached blocks and leaves them to be evicted.
    CachedUnowned,
    /// A member of a joint prefill serves KV of its stripes before they are computed.
    StripeUnawaited,
    /// A creditor does not send `LeaseSealed` for a block that moves there.
    SealUnreported,
    /// A debtor switches a moving block when it has sent the seal, without waiting for `LeaseSealed`.
    SealUnawaited,
    /// An instance computes a block hash from the block's index in the sequence, without its tokens.
    TokensUnhashed,
    /// An instance computes block hashes without the tenant's salt.
    SaltIgnored,
    /// A prefill worker sends its `PrefillReady` once, without repeats.
    AnswerUnrepeated,
    /// A fenced instance keeps waiting for replies to requests of its former incarnation.
    AskedByTheDead,
    /// A creditor frees blocks of an ended lease while transports read them.
    PinIgnored,
    /// An instance takes an ordered role at once, without finishing the work of the old one.
    RoleUnfinished,
    /// A gManager changes the role of the last instance of a kind.
    LastLeaves,
    /// A restarted gManager orders every instance to its registered role, even if its role is changing.
    RoleForgotten,
    /// A gManager sends a role order once, without repeats.
    RoleUnrepeated,
    /// A gManager forgets an instance's role order when it fences it.
    RoleFenced,
    /// A gManager assumes that an instance has received its last role order.
    RoleUnacknowledged,
    /// A prefill worker exports KV before the device has copied it to the staging buffer.
    StageUnawaited,
    /// A prefill worker reuses a staging buffer when all of a prompt is exported, while it may still be read.
    StageReused,
    /// A decode worker continues a prompt before the device has copied the arrived KV into its store.
    LandedUnstored,
    /// A decode worker reads a prompt into blocks while the device still has queued peers' writes for their former owner.
    WritesUnawaited,
    /// An instance fills a ring again from one position too late.
    RingLate,
    /// A prompt's last window is read, and its ring goes on without it.
    WindowUnread,
    /// A debtor sends a creditor the KV of drafts before they are accepted.
    DraftsUnheld,
    /// The first draft that was not sampled is accepted, too.
    DraftUnchecked,
    /// A relay merges the first member's partial twice.
    MemberMergedTwice,
    /// A dispatcher forgets a request that an instance gave back.
    HandBackLost,
    /// A dispatcher queues requests of an instance that left the reports again, as their callers do.
    BoundTwice,
    /// A dispatcher starts requests without charging their tenants.
    TenantUncharged,
    /// A dispatcher lets any number of requests pass a waiting head.
    HeadStarved,
    /// A gateway has an answer of which its client has the beginning computed again from its start.
    ReplayedFromStart,
    /// A gateway gives a request that kills instances to all of them.
    LossesUncounted,
}
