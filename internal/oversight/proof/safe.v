(* What always holds, and the proofs. *)

From Coq Require Import List Arith Bool Lia.
Import ListNotations.
Require Import words rules world.

Arguments any : simpl never.
Arguments tries_of : simpl never.
Arguments voters : simpl never.
Arguments same_version : simpl never.
Arguments Nat.max : simpl never.
Arguments Nat.eqb : simpl never.
Arguments Nat.leb : simpl never.

(* ---- The statements ---- *)

(* As many people as policy asks for approved one version with these bytes. *)
Definition by_people (want : nat) (said : list (nat * nat * nat)) (b : nat) : Prop :=
  exists v people count, sound count /\ want <= count people /\
    forall p, In p people -> In (p, v, b) said.

(* These very bytes may leave: policy allows them, or people approved them. *)
Definition authorised (w : world) (b : nat) : Prop :=
  allowed (past w) = Some b \/ by_people (wanted (past w)) (yes (past w)) b.

(* ---- The invariant ---- *)

(* It may be executed, is executed, or may be tried again. *)
Definition live (s : state) (in_doubt : bool) : bool :=
  match s with Approved | Executing => true | Unknown => negb in_doubt | _ => false end.

(* p is a part, o its attempts that nobody denied, s its action's state, d that a
   person said that it did not happen. *)
Definition part_fine (p : part) (o : list nat) (s : state) (d : bool) : Prop :=
  (part_open (asked p) (pst p) = true -> o = []) /\
  (pst p = PSending -> o = [attempts p]) /\
  length o <= 1 /\
  (asked p = true -> d = true \/ s = Unknown \/ settled s = true).

Record row_fine (r : row) (vs : list (nat * nat)) (cl : list claim) (h : history) : Prop := {
  f_votes : forall v p, In (v, p) vs -> v <= ver r;
  f_counted : forall p, In (ver r, p) vs -> In (p, ver r, digest r) (yes h);
  f_need : settled (st r) = false -> wanted h <= need r;
  f_ruled : live (st r) (doubt h) = true -> ruled r = true -> allowed h = Some (digest r);
  f_people : live (st r) (doubt h) = true -> ruled r = false -> by_people (wanted h) (yes h) (digest r);
  f_fresh : live (st r) (doubt h) = true -> halted r = false -> fresh h = true;
  f_fresh2 : st r = Approved -> fresh h = true;
  f_claimed : forall c, In c cl -> c_ver c <= ver r;
  f_claims : forall c, In c cl -> st r = Executing -> c_ver c = ver r -> c_digest c = digest r;
  f_doubt : doubt h = true -> st r = Unknown;
  f_ever : is_some (st r) Executing || is_some (st r) Unknown = true -> ever h = true;
  f_open : is_some (st r) Executing = true -> open h = [ver r];
  f_closed : is_some (st r) Scheduled || is_some (st r) Pending || is_some (st r) Approved = true -> open h = [];
  f_never : ever h = false -> open h = [];
  f_new : ver r = 0 -> st r = Denied /\ ever h = false;
  f_deadline : is_some (st r) Scheduled || is_some (st r) Pending = true -> deadline r = true
}.

Record fine (w : world) : Prop := {
  f_row : row_fine (now w) (votes w) (claims w) (past w);
  f_parts : forall n, part_fine (parts w n) (outs (past w) n) (st (now w)) (denied (past w));
  f_unasked : ever (past w) = false -> forall n, asked (parts w n) = false
}.

(* ---- Parts ---- *)

Lemma parts_follow : forall w r h s0 d0,
  (forall n, part_fine (parts w n) (outs h n) s0 d0) ->
  (d0 = true -> denied h = true) ->
  (s0 = Unknown -> st r = Unknown \/ settled (st r) = true \/ denied h = true) ->
  (settled s0 = true -> settled (st r) = true \/ forall n, asked (parts w n) = false) ->
  forall n, part_fine (parts (moved w r h) n) (outs (past (moved w r h)) n) (st r) (denied (past (moved w r h))).
Proof.
  intros w r h s0 d0 F D U S n. specialize (F n).
  assert (S' : settled s0 = true -> settled (st r) = true \/ asked (parts w n) = false) by (intros K; destruct (S K); auto).
  clear S. unfold moved, follow, deny; cbn.
  destruct (parts w n) as [ps q at_]. destruct F as (F1 & F2 & F3 & F4). cbn in *.
  destruct (st r), q, ps; cbn in *; destruct (denied h); cbn; unfold part_fine; cbn;
    repeat split; intros; try discriminate; auto; try lia;
    try (destruct F4 as [F4|[F4|F4]]; auto; try (destruct (S' F4)); intuition discriminate).
Qed.

Lemma parts_interrupt : forall ps o s d,
  (forall n, part_fine (ps n) (o n) s d) -> forall n, part_fine (interrupt ps n) (o n) s d.
Proof.
  intros ps o s d F n. specialize (F n). unfold interrupt.
  destruct (ps n) as [x q a]. destruct F as (F1 & F2 & F3 & F4). cbn in *.
  destruct x, q; cbn; unfold part_fine; cbn; repeat split; intros; try discriminate; auto; lia.
Qed.

(* ---- Every input keeps the invariant ---- *)

Lemma fine_start : fine start.
Proof.
  constructor; [constructor| |]; cbn; try tauto; try discriminate; try lia.
  intros n. unfold part_fine; cbn; repeat split; intros; try discriminate; auto.
Qed.

Definition keeps (i : input) : Prop := forall w w', fine w -> fair w i -> step w i = Some w' -> fine w'.

Ltac open_world w F :=
  destruct w as [[s v pl dg nd ru tr ha dl] vs sw cl ps [ys al wa fr ev db op dn ou]];
  destruct F as [[Fvotes Fcounted Fneed Fruled Fpeople Ffresh Ffresh2 Fclaimed Fclaims Fdoubt Fever Fopen Fclosed Fnever Fnew Fdeadline] Fparts Funasked];
  cbn in Fvotes, Fcounted, Fneed, Fruled, Fpeople, Ffresh, Ffresh2, Fclaimed, Fclaims, Fdoubt, Fever, Fopen, Fclosed, Fnever, Fnew, Fdeadline, Fparts, Funasked.

(* Takes apart only what the rule asks where it asks it: most of a rule's cases are
   refusals, which cannot be steps. *)
Ltac take_apart H :=
  unfold proposed, revised, time_ended, cancelled, claimed, ended, resolved in H;
  repeat (cbn in H; try discriminate H; match type of H with
  | context [match ?x with _ => _ end] => is_var x; destruct x
  | context [if ?x && _ then _ else _] => is_var x; destruct x
  | context [if any ?n then _ else _] => destruct (any n)
  | context [match tries_of ?n with _ => _ end] => destruct (tries_of n)
  end); try discriminate H.

Ltac old_vote := match goal with
  | F : forall v p, In (v, p) ?l -> v <= _, H : In (_, _) ?l |- _ => apply F in H; lia
  end.

Ltac doubted := match goal with
  | F : ?x = true -> _ = Unknown, H : ?x = true |- _ => specialize (F H); discriminate F
  end.

Ltac row_easy :=
  constructor; cbn; intros; try discriminate; auto; try doubted;
  try old_vote; try lia; try congruence;
  try (match goal with F : forall v p, In (v, p) ?l -> v <= ?n, H : In (_, _) ?l |- _ <= _ => apply F in H; lia end);
  try (match goal with F : forall c, In c ?l -> c_ver c <= ?n, H : In _ ?l |- _ => apply F in H; lia end);
  try (match goal with F : _ -> ?e = true |- ?e || _ = true => rewrite F by reflexivity; reflexivity end);
  try (match goal with H : _ || false = false |- _ => rewrite orb_false_r in H; auto end).

Ltac parts_easy Fparts :=
  eapply parts_follow; [exact Fparts | cbn ..]; auto; try discriminate; try congruence.

Lemma unasked_follow : forall w r h,
  (ever h = false -> forall n, asked (parts w n) = false) -> (st r = Unknown -> ever h = true) ->
  ever (past (moved w r h)) = false -> forall n, asked (parts (moved w r h) n) = false.
Proof.
  intros w r h A U E n. cbn in E. apply orb_false_iff in E. destruct E as (E & _). specialize (A E n).
  unfold moved, follow; cbn. destruct (parts w n) as [x q a]. cbn in *. subst.
  destruct (st r), x; cbn; auto; rewrite U in E by reflexivity; discriminate.
Qed.

Ltac new_easy Funasked := apply unasked_follow; [exact Funasked | cbn; intros; try discriminate; auto].

Lemma time_came_keeps : forall passed, keeps (TimeCame passed).
Proof.
  intros p w w' F X H. open_world w F. cbn in H. destruct s, p; cbn in H; try discriminate.
  injection H as <-. constructor; [row_easy | parts_easy Fparts | new_easy Funasked].
Qed.

Lemma time_ended_keeps : forall e, keeps (TimeEnded e).
Proof.
  intros e w w' F X H. open_world w F. cbn in H. destruct s, e; cbn in H; try discriminate.
  destruct (any tr); injection H as <-; (constructor; [row_easy | parts_easy Fparts | new_easy Funasked]).
Qed.

Lemma cancel_keeps : forall who, keeps (Cancel who).
Proof.
  intros who w w' F X H. open_world w F. cbn in H. take_apart H; injection H as <-; (constructor; [row_easy | parts_easy Fparts | new_easy Funasked]).
Qed.

Lemma propose_keeps : forall b n x v a l, keeps (Propose b n x v a l).
Proof.
  intros b n x v' a l w w' F X H. open_world w F. cbn in H.
  destruct (v =? 0) eqn:N; cbn in H; try discriminate. apply Nat.eqb_eq in N. destruct (Fnew N) as [-> ->].
  take_apart H; injection H as <-; (constructor; [row_easy | parts_easy Fparts | new_easy Funasked]).
Qed.

Lemma revise_keeps : forall who b n x v c e a l, keeps (Revise who b n x v c e a l).
Proof.
  intros who b n x v' c e a l w w' F X H. open_world w F. cbn in H.
  take_apart H; injection H as <-; (constructor; [row_easy | parts_easy Fparts | new_easy Funasked]).
Qed.

Lemma in_voters : forall v p vs, In p (voters v vs) -> In (v, p) vs.
Proof.
  intros v p vs H. apply in_map_iff in H. destruct H as ([a b] & E & H). cbn in E; subst.
  apply filter_In in H. destruct H as (H & E). cbn in E. apply Nat.eqb_eq in E. subst. exact H.
Qed.

Lemma by_people_more : forall want said said' b,
  by_people want said b -> (forall x, In x said -> In x said') -> by_people want said' b.
Proof. intros want said said' b (v & l & c & S & N & A) M. exists v, l, c. auto. Qed.

Lemma not_later : forall n, (n =? S n) = false.
Proof. intros. apply Nat.eqb_neq. lia. Qed.

Ltac later H :=
  unfold same_version in H; cbn -[Nat.eqb] in H; rewrite ?not_later, ?Nat.eqb_refl in H; cbn in H; injection H as <-.

Lemma decide_keeps : forall d, keeps (Decide d).
Proof.
  intros [p dv sh ap de ex ask se ad stg la ct] w w' F X H. open_world w F. cbn in X. cbn in H.
  destruct de; cbn in H; try discriminate.
  destruct (pl =? dg) eqn:E1; cbn in H; try discriminate.
  destruct (sh =? dg) eqn:E2; cbn in H; try discriminate.
  destruct s; cbn in H; try discriminate.
  destruct (dv =? v) eqn:E3; cbn in H; try discriminate.
  destruct ex; cbn in H; try discriminate.
  destruct ask; cbn in H; try discriminate.
  apply Nat.eqb_eq in E1, E2, E3. subst.
  destruct ap; cbn in H.
  - destruct se; cbn in H; try discriminate.
    destruct ad; cbn in H; try discriminate.
    destruct stg; cbn in H; try discriminate.
    destruct sw; cbn in H; try discriminate.
    destruct la; cbn in H.
    + later H.
      constructor; [row_easy | parts_easy Fparts | new_easy Funasked].
    + match type of H with context [if ?b then Moves Approved _ else _] => destruct b eqn:E4; cbn in H end.
      * later H.
        apply Nat.leb_le in E4.
        constructor; [|parts_easy Fparts | new_easy Funasked].
        row_easy.
        -- destruct H as [H|H]; [injection H as <- <-; lia | apply Fvotes in H; lia].
        -- destruct H as [H|H]; [injection H as H; lia | apply Fvotes in H; lia].
        -- exists v, (p :: voters v vs), ct. repeat split; auto; [specialize (Fneed eq_refl); lia|].
           intros q [<-|I]; [left; reflexivity|]. right. apply Fcounted, in_voters, I.
      * later H.
        constructor; cbn; [|exact Fparts | exact Funasked].
        row_easy.
        -- destruct H as [H|H]; [injection H as <- <-; lia | apply Fvotes in H; lia].
        -- destruct H as [H|H]; [injection H as <-; left; reflexivity | right; apply Fcounted, H].
  - destruct (any tr); cbn in H; later H;
      (constructor; [row_easy | parts_easy Fparts | new_easy Funasked]).
Qed.

Lemma take_keeps : forall due judge v n, keeps (Take due judge v n).
Proof.
  intros due judge v' n w w' F X H. open_world w F. cbn in H.
  destruct s; cbn in H; try discriminate. destruct due; cbn in H; try discriminate.
  destruct sw, judge, ru; take_apart H; injection H as <-;
  (constructor; [row_easy | parts_easy Fparts | new_easy Funasked]).
  all: try (destruct H as [<-|H]; cbn; auto; try lia; apply Fclaimed in H; lia).
  all: try (rewrite Fclosed by reflexivity; reflexivity).
Qed.

Lemma hold_keeps : forall c, keeps (Hold c).
Proof.
  intros c w w' F X H. open_world w F. cbn in H. destruct s; cbn in H; try discriminate.
  destruct (c_ver c =? v); cbn in H; try discriminate. injection H as <-.
  constructor; cbn; [row_easy | exact Fparts | exact Funasked].
Qed.

Lemma begin_keeps : forall c n, keeps (Begin c n).
Proof.
  intros c n w w' F X H. open_world w F. cbn in H.
  destruct (c_payload c =? c_digest c); cbn in H; try discriminate.
  destruct s; cbn in H; try discriminate.
  destruct (c_ver c =? v); cbn in H; try discriminate.
  destruct ha; cbn in H; try discriminate. destruct sw; cbn in H; try discriminate.
  destruct (part_begins (asked (ps n)) (pst (ps n))) eqn:E; cbn in H; try discriminate. injection H as <-.
  constructor; cbn; [row_easy | |intros N; rewrite Fever in N by reflexivity; discriminate].
  intros m. destruct (m =? n) eqn:M; [|apply Fparts].
  specialize (Fparts n). destruct (ps n) as [x q a]; destruct Fparts as (F1 & F2 & F3 & F4); cbn in *.
  destruct x, q; cbn in E; try discriminate; injection E as <- <- <-; unfold part_fine; cbn;
    rewrite F1 by reflexivity; cbn; repeat split; intros; try discriminate; auto.
Qed.

Lemma part_result : forall p o s d a to, part_fine p o s d ->
  part_ends (a =? attempts p) (asked p) (pst p) to <> PRefused ->
  let p' := part_after (part_ends (a =? attempts p) (asked p) (pst p) to) p in
  part_fine p' (match to with PDelivered => [a] | PSending | PUncertain => o | _ => remove Nat.eq_dec a o end) s d /\
  (asked p = false -> asked p' = false).
Proof.
  intros [x q n] o s d a to (F1 & F2 & F3 & F4) E. cbn in *.
  destruct (a =? n) eqn:A; [|destruct (E eq_refl)]. apply Nat.eqb_eq in A. subst.
  destruct x, q, to; cbn in *; try (destruct (E eq_refl)); unfold part_fine; cbn; repeat split; intros; try discriminate; auto;
    try rewrite F2 by reflexivity; cbn; try (destruct (Nat.eq_dec n n); [|lia]); cbn; auto.
Qed.

Lemma result_keeps : forall n a to, keeps (Result n a to).
Proof.
  intros n a to w w' F X H. open_world w F. cbn -[part_ends] in H.
  destruct (part_ends (a =? attempts (ps n)) (asked (ps n)) (pst (ps n)) to) eqn:E; try discriminate; injection H as <-.
  all: assert (R := part_result _ _ _ _ a to (Fparts n)); rewrite E in R; destruct R as (R1 & R2); [discriminate|].
  all: constructor; cbn -[part_after]; [row_easy | intros m | intros N m].
  all: destruct (m =? n) eqn:M; auto.
Qed.

Lemma end_keeps : forall version gone ours to free, keeps (End version gone ours to free).
Proof.
  intros version gone ours to free w w' F X H. open_world w F. cbn in H.
  destruct s; cbn in H; try discriminate.
  destruct (version =? v) eqn:E; cbn in H; try discriminate. apply Nat.eqb_eq in E. subst.
  destruct ours; cbn in H; try discriminate.
  assert (EV : ev = true) by (apply Fever; reflexivity). subst ev.
  assert (P : forall n, part_fine ((if gone then interrupt ps else ps) n) (ou n) Executing dn)
    by (destruct gone; [apply parts_interrupt|]; exact Fparts).
  take_apart H; injection H as <-.
  all: constructor; [row_easy | try (parts_easy P) | cbn; intros; discriminate].
  all: try (rewrite Fopen by reflexivity; cbn; destruct (Nat.eq_dec v v); [reflexivity|lia]).
  all: cbn; intros m; specialize (P m); destruct P as (F1 & F2 & F3 & F4); repeat split; auto;
    intros A; destruct (F4 A) as [D|[D|D]]; auto; discriminate.
Qed.

Lemma on_keeps : keeps SwitchOn.
Proof.
  intros w w' F X H. open_world w F. cbn in H.
  destruct s; cbn in H; try discriminate.
  all: try destruct ha; try destruct (any tr); cbn in H; later H.
  all: constructor; [row_easy | try (parts_easy Fparts); try exact Fparts | try (new_easy Funasked); try exact Funasked].
Qed.

Lemma off_keeps : keeps SwitchOff.
Proof.
  intros w w' F X H. open_world w F. cbn in H. injection H as <-.
  constructor; cbn; [row_easy | exact Fparts | exact Funasked].
Qed.

Lemma resolve_keeps : forall decides to version changed, keeps (Resolve decides to version changed).
Proof.
  intros decides to version changed w w' F X H. open_world w F. cbn in X. cbn in H.
  destruct (version =? v); take_apart H; injection H as <-.
  all: constructor; [row_easy | parts_easy Fparts | new_easy Funasked].
  all: try (destruct db; [specialize (X eq_refl); discriminate | auto]).
Qed.

Lemma leave_keeps : forall p, keeps (Leave p).
Proof.
  intros p w w' F X H. open_world w F. cbn in H. injection H as <-.
  constructor; cbn; [|exact Fparts | exact Funasked].
  row_easy; apply filter_In in H; destruct H as (H & _); eauto.
Qed.

Lemma tamper_keeps : forall b, keeps (Tamper b).
Proof.
  intros b w w' F X H. open_world w F. cbn in H. injection H as <-.
  constructor; cbn; [row_easy | exact Fparts | exact Funasked].
Qed.

(* What becomes of a row that was found changed: it ends, as the record says that it
   had; or a person is asked, about all of it, above all versions that there were. *)
Lemma distrusted_spec : forall re be ends xs tr sw v b x,
  exists s ver' ru' tr' dl' n',
    after (distrusted true (Some re) be ends xs tr sw v) b x = Some (Row s ver' (payload x) (digest x) n' ru' tr' (halted x) dl') /\
    ver' = S (b_above b) /\
    (settled re = true -> s = re) /\ (settled re = false -> settled s = true -> s = Denied \/ s = Failed) /\
    (settled s = true \/ (n' = max (b_need b) 1 /\ ru' = true /\
      (s = Unknown /\ be || ends = true \/ s = Pending /\ be = false /\ dl' = true))).
Proof.
  intros re be ends xs tr sw v b [s ve p d n u t h dl].
  unfold distrusted; repeat (cbn; match goal with |- context [after (match ?x with _ => _ end)] => is_var x; destruct x end); cbn; do 6 eexists; (split; [reflexivity|]);
    repeat (split; [cbn; auto; discriminate || (intros; discriminate)|]); cbn; auto 10.
Qed.

(* What nobody proposed ends. *)
Lemma distrusted_nobody : forall re be ends xs tr sw v b x,
  exists s u t n dl, settled s = true /\
    after (distrusted false re be ends xs tr sw v) b x = Some (Row s (S (b_above b)) (payload x) (digest x) n u t (halted x) dl).
Proof.
  intros re be ends xs tr sw v b [s ve p d n u t h dl].
  unfold distrusted; repeat (cbn; match goal with |- context [after (match ?x with _ => _ end)] => is_var x; destruct x end); cbn;
    do 5 eexists; (split; [|reflexivity]); reflexivity.
Qed.

Lemma found_keeps : forall x en re be ends ab n v, keeps (Found x en re be ends ab n v).
Proof.
  intros x en re be ends ab n v' w w' F X H. open_world w F.
  cbn in X. destruct X as (X0 & X1 & X2 & X3 & X4 & X5).
  unfold step in H. cbn -[distrusted after moved] in H.
  destruct (Nat.eq_dec v 0) as [V|V].
  - rewrite (X0 V) in H. destruct (Fnew V) as [-> ->].
    destruct (distrusted_nobody re be ends (st x) (any (tried x)) sw v' (Brings 0 n ab) x) as (s & u & t & m & dl' & S & E).
    rewrite E in H. injection H as <-.
    assert (s <> Approved /\ s <> Unknown) as (NA & NU) by (split; intros ->; cbn in S; discriminate).
    constructor; [|parts_easy Fparts | apply unasked_follow; [exact Funasked | cbn; intros; congruence]].
    destruct s; try discriminate; row_easy.
  - destruct X1 as (-> & re' & -> & X1); [lia|].
    destruct (distrusted_spec re' be ends (st x) (any (tried x)) sw v' (Brings 0 n ab) x) as (s' & ve & u & t & dl' & m & E & -> & A & B & C).
    rewrite E in H. cbn in C. injection H as <-.
    destruct C as [C|(-> & -> & [(-> & C)|(-> & -> & ->)])].
    + constructor; [destruct s'; try discriminate; row_easy | parts_easy Fparts |
        apply unasked_follow; [exact Funasked | cbn; intros ->; cbn in C; discriminate]].
    + assert (EV : ev = true) by (destruct be; auto). subst.
      constructor; [row_easy | parts_easy Fparts | cbn; intros; discriminate].
      intros S. exfalso. destruct (settled re') eqn:R.
      * rewrite <- (A eq_refl) in R. discriminate R.
      * rewrite (X1 (or_intror S)) in R. congruence.
    + subst. constructor; [row_easy | parts_easy Fparts | apply unasked_follow; [exact Funasked | cbn; intros; discriminate]].
      all: intros S; exfalso; first
        [ subst; discriminate (Fever eq_refl)
        | destruct (settled re') eqn:R;
            [rewrite <- (A eq_refl) in R; discriminate R | rewrite (X1 (or_intror S)) in R; congruence] ].
Qed.

Theorem always_fine : forall w, reach w -> fine w.
Proof.
  intros w R. induction R as [|w i w' R F X H]; [exact fine_start|].
  destruct i; revert F X H.
  - apply propose_keeps. - apply revise_keeps. - apply time_came_keeps. - apply time_ended_keeps. - apply decide_keeps.
  - apply cancel_keeps. - apply take_keeps. - apply hold_keeps. - apply begin_keeps. - apply result_keeps. - apply end_keeps.
  - apply on_keeps. - apply off_keeps. - apply resolve_keeps. - apply leave_keeps. - apply tamper_keeps. - apply found_keeps.
Qed.

(* ---- The theorems ---- *)

(* Nothing leaves unapproved: when a part begins, policy allows the very bytes that
   its program holds, or as many people as it asks for approved these bytes at one
   version. *)
Theorem nothing_leaves_unapproved : forall w c n w',
  reach w -> In c (claims w) -> step w (Begin c n) = Some w' -> authorised w (c_payload c).
Proof.
  intros w c n w' R I H. destruct (always_fine w R) as [[] _ _]. cbn in H.
  destruct (c_payload c =? c_digest c) eqn:E; cbn in H; [|discriminate]. apply Nat.eqb_eq in E.
  destruct (st (now w)) eqn:S; cbn in H; try discriminate.
  destruct (c_ver c =? ver (now w)) eqn:V; cbn in H; [|discriminate]. apply Nat.eqb_eq in V.
  rewrite E, (f_claims0 c I eq_refl V). unfold authorised.
  destruct (ruled (now w)) eqn:U; [left; auto | right; auto].
Qed.

(* Switches hold: while a switch that stops it is on, no part begins; and what begins
   was approved after every one that was ever turned on. *)
Theorem switches_hold : forall w c n w',
  reach w -> step w (Begin c n) = Some w' -> on w = false /\ fresh (past w) = true.
Proof.
  intros w c n w' R H. destruct (always_fine w R) as [[] _ _]. cbn in H.
  destruct (c_payload c =? c_digest c) eqn:E; cbn in H; [|discriminate].
  destruct (st (now w)) eqn:S; cbn in H; try discriminate.
  destruct (c_ver c =? ver (now w)) eqn:V; cbn in H; [|discriminate].
  destruct (halted (now w)) eqn:A; cbn in H; [discriminate|].
  destruct (on w) eqn:O; cbn in H; [discriminate|]. auto.
Qed.

(* At most once: of a part, one attempt at most may have had an effect that neither its
   executor, who is certain, nor a person has denied; and a part begins only where
   there is none. *)
Theorem at_most_once : forall w n, reach w -> length (outs (past w) n) <= 1.
Proof. intros w n R. destruct (always_fine w R) as [_ P _]. apply P. Qed.

Theorem begins_once : forall w c n w', reach w -> step w (Begin c n) = Some w' -> outs (past w) n = [].
Proof.
  intros w c n w' R H. destruct (always_fine w R) as [_ P _]. destruct (P n) as (F & _). apply F. cbn in H.
  destruct (intact _); try discriminate. destruct (after _ _ _); try discriminate.
  destruct (pst (parts w n)), (asked (parts w n)); cbn in *; try discriminate; reflexivity.
Qed.

(* The same of an action as a whole, for effects without parts. *)
Theorem taken_once : forall w due judge v n w',
  reach w -> step w (Take due judge v n) = Some w' -> open (past w) = [].
Proof.
  intros w due judge v n w' R H. destruct (always_fine w R) as [[] _ _]. cbn in H.
  destruct (st (now w)) eqn:S; cbn in H; try discriminate. auto.
Qed.

(* ---- Nothing is lost ---- *)

(* The rules by which an action ends, and how. *)
Definition ends (i : input) (s : state) : bool :=
  match i, s with
  | Propose _ _ _ _ _ _, Denied | Revise _ _ _ _ _ _ _ _ _, Denied => true   (* policy or a switch denies it *)
  | TimeEnded _, (Denied | Failed) => true                                    (* nobody decided *)
  | Decide d, (Denied | Failed) => negb (d_approve d) && d_decides d          (* a person rejected it *)
  | Cancel _, Cancelled => true
  | Take _ _ _ _, (Denied | Failed) => true                                   (* policy or a switch denies it now *)
  | End _ _ _ _ _, (Done | Failed | Denied) => true                           (* its execution ended, or a switch ended it *)
  | SwitchOn, (Denied | Failed) => true
  | Resolve _ _ _ _, (Done | Failed) => true                                  (* a person said what became of it *)
  | Found _ _ _ _ _ _ _ _, _ => true                                          (* the record says that it had ended, or it is denied *)
  | _, _ => false
  end.

(* What waits, was approved or is executed ends only by one of these. *)
Theorem nothing_is_lost : forall w i w',
  step w i = Some w' -> settled (st (now w)) = false -> settled (st (now w')) = true -> ends i (st (now w')) = true.
Proof.
  intros w i w' H S E. destruct w as [[s v pl dg nd ru tr ha dl] vs sw cl ps h]. cbn in S.
  destruct i; try reflexivity; cbn in H.
  - destruct (v =? 0); cbn in H; try discriminate. destruct stops, v0, ask, later; cbn in H; injection H as <-; cbn in *; auto.
  - take_apart H; injection H as <-; cbn in *; auto.
  - destruct s, passed; cbn in H; try discriminate; injection H as <-; cbn in *; auto.
  - take_apart H; injection H as <-; cbn in *; auto.
  - destruct d as [p dv sh ap de ex ask se ad stg la ct]. cbn in *.
    destruct de; cbn in H; try discriminate. destruct (pl =? dg); cbn in H; try discriminate.
    destruct (sh =? dg); cbn in H; try discriminate. destruct s; cbn in H; try discriminate.
    destruct (dv =? v); cbn in H; try discriminate. destruct ex; cbn in H; try discriminate.
    destruct ask; cbn in H; try discriminate. destruct ap; cbn in H.
    + destruct se, ad, stg, sw; cbn in H; try discriminate. destruct la; cbn in H; [later H; discriminate E|].
      match type of H with context [if ?b then Moves Approved _ else _] => destruct b; cbn in H end; later H; discriminate E.
    + destruct (any tr); cbn in H; later H; reflexivity.
  - take_apart H; injection H as <-; cbn in *; auto.
  - destruct s; cbn in H; try discriminate. destruct due; cbn in H; try discriminate.
    destruct sw, judge, ru; take_apart H; injection H as <-; cbn in *; auto.
  - destruct s; cbn in H; try discriminate. destruct (c_ver c =? v); cbn in H; try discriminate.
    injection H as <-. discriminate E.
  - destruct (c_payload c =? c_digest c); cbn in H; try discriminate. destruct s; cbn in H; try discriminate.
    destruct (c_ver c =? v); cbn in H; try discriminate. destruct ha, sw; cbn in H; try discriminate.
    destruct (part_begins _ _); cbn in H; try discriminate. injection H as <-. discriminate E.
  - destruct (part_ends _ _ _ _); try discriminate; injection H as <-; cbn in *; congruence.
  - destruct s; cbn in H; try discriminate. destruct (version =? v); cbn in H; try discriminate.
    take_apart H; injection H as <-; cbn in *; auto.
  - destruct s; cbn in H; try discriminate; try destruct ha; try destruct (any tr); cbn in H; later H; cbn in *; auto.
  - injection H as <-. cbn in *. congruence.
  - destruct (version =? v); take_apart H; injection H as <-; cbn in *; auto.
  - injection H as <-. cbn in *. congruence.
  - injection H as <-. cbn in *. congruence.
Qed.

(* And what has ended stays as it ended. *)
Theorem ends_are_final : forall w i w',
  fair w i -> step w i = Some w' -> 1 <= ver (now w) -> settled (st (now w)) = true -> st (now w') = st (now w).
Proof.
  intros w i w' F H V S.
  destruct w as [[s v pl dg nd ru tr ha dl] vs sw cl ps h]. cbn in S, V.
  destruct i; cbn in F.
  - cbn in H. replace (v =? 0) with false in H by (symmetry; apply Nat.eqb_neq; lia). discriminate H.
  - cbn in H. destruct s; try discriminate S; take_apart H.
  - cbn in H. destruct s; try discriminate S; discriminate H.
  - cbn in H. destruct s; try discriminate S; discriminate H.
  - destruct d as [p dv sh ap de ex ask se ad stg la ct]. cbn in H.
    destruct de; cbn in H; try discriminate H. destruct (pl =? dg); cbn in H; try discriminate H.
    destruct (sh =? dg); cbn in H; try discriminate H. destruct s; try discriminate S; discriminate H.
  - cbn in H. destruct s; try discriminate S; take_apart H.
  - cbn in H. destruct s; try discriminate S; discriminate H.
  - cbn in H. destruct s; try discriminate S; discriminate H.
  - cbn in H. destruct (c_payload c =? c_digest c); cbn in H; try discriminate H. destruct s; try discriminate S; discriminate H.
  - cbn -[part_ends] in H. destruct (part_ends _ _ _ _); try discriminate; injection H as <-; reflexivity.
  - cbn in H. destruct s; try discriminate S; discriminate H.
  - cbn in H. destruct s; try discriminate S; cbn in H; injection H as <-; reflexivity.
  - cbn in H. injection H as <-. reflexivity.
  - cbn in H. destruct (version =? v), s; try discriminate S; take_apart H.
  - cbn in H. injection H as <-. reflexivity.
  - cbn in H. injection H as <-. reflexivity.
  - destruct F as (_ & F & _). destruct (F V) as (-> & re & -> & F').
    assert (E : re = s) by (apply F'; right; exact S). subst.
    unfold step in H. cbn -[distrusted after moved] in H.
    match type of H with context [after (distrusted true (Some s) ?b ?e ?x ?t ?o ?y) ?z ?r] =>
      destruct (distrusted_spec s b e x t o y z r) as (s' & a1 & a2 & a3 & a4 & a5 & E & _ & A & _) end.
    rewrite E in H. injection H as <-. cbn. apply A, S.
Qed.
