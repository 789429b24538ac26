"""The pure core of Wattfleet: power modes, profiles, predictors, fronts, budgets and round plans.

It works on arrays and CSV files. It opens no socket, starts no thread and reads no clock, so that the services and the
simulation can share it. Import from its folders, such as `wattfleet.core.modes`; deeper modules are private.

From a few measured modes to a choice under a budget (`examples/choose_a_mode.py`)::

    import reference_models
    from wattfleet.core.choosing import KnownModes, fastest_within_budget, predicted_front
    from wattfleet.core.modes import board_named, read_profile
    from wattfleet.core.prediction import restore_predictor

    board = board_named("orin-nano")
    modes = board.space.array()
    measured = read_profile(Path("measured.csv"))
    reference = restore_predictor(reference_models.load("agx_orin_resnet18"), board)
    predictor = type(reference).fit(measured, reference)
    prediction = predictor.predict(modes)
    front = predicted_front(modes, prediction, minibatches_per_epoch=500)
    choice = fastest_within_budget(KnownModes.of(modes, prediction, measured), budget_mw=15_000)
"""
