def run(config, folder, **k):
    print(config.name, folder, k)
