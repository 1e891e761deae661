//! Mistakes that are made on purpose: see [`lagoon_types::mutants`].

lagoon_types::mutants! {
    /// A creditor grants blocks of a lease that stands once more.
    DoubleGrant,
    /// A debtor takes a release for confirmed as soon as it is sent.
    ReleaseUnconfirmed,
    /// A creditor serves whom it lends to, whatever lease and epoch are named.
    EpochUnchecked,
    /// A debtor frees a block that moves when its copy is verified, before its table points to the copy.
    FreedBeforeSwitched,
    /// A creditor does not tell that a block that moves there is sealed.
    SealUnreported,
    /// A debtor does not wait for that: it switches when it has sent the seal.
    SealUnawaited,
    /// An instance names what a block holds by its place in the sequence, whatever its tokens are.
    TokensUnnamed,
    /// An instance that computed a prompt for another one says so once, whether or not that was heard.
    AnswerUnrepeated,
    /// An instance that was declared dead goes on waiting for what its former life asked for.
    AskedByTheDead,
    /// A creditor frees blocks of a lease that has ended while transports read them.
    PinIgnored,
    /// An instance has the role that it was told to have at once, whatever it has begun in the old one.
    RoleUnfinished,
    /// A gManager gives the last instance of a kind another role.
    LastLeaves,
    /// A gManager that starts anew has every instance be what it registers as, whatever it is becoming.
    RoleForgotten,
    /// A gManager says once which role an instance shall have, whether or not that was heard.
    RoleUnrepeated,
    /// A gManager forgets what it told an instance when it declares it dead.
    RoleFenced,
    /// A gManager counts on an instance to have heard the last word on its role.
    RoleUnacknowledged,
    /// A prefill worker offers what it computed before the device has copied it to where transports read.
    StageUnawaited,
    /// A prefill worker uses memory beside its store again when all of a prompt is exported, not when nobody reads it.
    StageReused,
    /// A decode worker goes on with a prompt before the device has copied what arrived into its store.
    LandedUnstored,
    /// A decode worker has a prompt read into blocks while the device has peers' writes to do for whoever had them before.
    WritesUnawaited,
}
